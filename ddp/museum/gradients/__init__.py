"""Bugs after which all ranks agree, but on a wrong gradient."""
