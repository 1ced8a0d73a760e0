"""``doctor --dumps``: which rank did not join which collective, from dumps and stacks of any job (__main__ is ../doctor.py)."""
