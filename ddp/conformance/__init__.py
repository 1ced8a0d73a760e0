"""Does a DDP wrapper do what torch's does? A suite of checks for a wrapper of your own (``python -m ddp.conformance``).

runner.py runs the checks of checks/ on ranks, and tells those that fail, hang, or are not offered.
"""
