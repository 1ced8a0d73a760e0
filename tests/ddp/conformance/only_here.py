"""A module that the command can import, but its ranks cannot."""

from __future__ import annotations

import multiprocessing

from torch.nn.parallel import DistributedDataParallel as Wrapper

__all__ = ["Wrapper"]

if multiprocessing.parent_process() is not None:
    raise ImportError("not on a rank")
