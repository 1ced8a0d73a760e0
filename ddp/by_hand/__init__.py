"""DistributedDataParallel by hand, from the simplest form that is right (naive.py) to all that torch's does (wrapper.py)."""

from ddp.by_hand.naive import NaiveDistributedDataParallel
from ddp.by_hand.wrapper import HandwrittenDistributedDataParallel

__all__ = ["HandwrittenDistributedDataParallel", "NaiveDistributedDataParallel"]
