"""The same small job, started in nine ways; and a real SLURM for it."""
