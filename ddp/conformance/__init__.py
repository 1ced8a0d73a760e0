"""Does a DDP wrapper do what torch's does? A suite of checks for a wrapper of your own (``python -m ddp.conformance``)."""
