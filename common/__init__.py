"""The parts that the three subjects share. Imports none of them.

machine.py       cores and the allocator; device_errors.py: memory that ran out
cli.py           a command's settings; errors.py, error_line.py, stdout.py: one line for a mistake, results that are printed
launchers.py     SLURM's, LSF's and Azure ML's variables, as torchrun's
randomness.py    draws without state
"""
