"""Deliberate attempts to break the commands, as data: what is done, and what must come out. See README.md."""
