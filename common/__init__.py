"""The parts that the three subjects share. Imports none of them.

command_line/    a command: its settings, one line for a user error, what it prints; errors.py: the error that is such a line
distributed/     the ranks of a job; launchers.py: SLURM's, LSF's and Azure ML's variables, as torchrun's
machine.py       cores and the allocator; device_errors.py: memory that ran out
randomness.py    draws without state
"""
