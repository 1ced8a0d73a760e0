"""A job's log, read: which rank failed first, at which line, and which of its errors are only consequences.

python -m ddp.launch.doctor --explain LOG...
"""
