"""From the usual first training script to the fastest run, one change at a time."""
