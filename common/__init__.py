"""The parts that the three subjects share. Imports none of them.

command_line/    a command: its settings, one line for a mistake, what it prints; errors.py: the error that is such a line
distributed/     the ranks of a job, and the launchers that have started them
machine.py       cores and the allocator; device_errors.py: memory that ran out
randomness.py    draws without state
"""
