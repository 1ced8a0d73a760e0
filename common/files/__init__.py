"""Files that a run owns: its directory, and files that are written whole or not at all."""
