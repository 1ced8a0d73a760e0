"""A command: its settings, its one line for a mistake, what it prints, and the functions that it is given by name."""
