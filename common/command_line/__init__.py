"""A command: its settings, its one line for a user error, what it prints, and the functions that it is given by name."""
