"""The attempts as data: what is done, and what must come out. One class a file."""
