"""Runs somebody's script, unchanged, and lets a module of ours watch torch in every process of it."""
