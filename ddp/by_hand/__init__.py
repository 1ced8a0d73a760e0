"""DistributedDataParallel by hand, from the simplest form that is right to buckets that overlap with backward.

naive.py      after backward, one all-reduce per parameter
wrapper.py    THE LESSON: buckets that are averaged while backward goes on. It stands on reducer.py (a backward pass),
              buckets.py, replicas.py (equal weights), outputs.py (tensors in an output) and errors.py (refusals)
comm_hook.py  beside it: functions that average a bucket in another way, compressed for example
join.py       beside it: ranks with different numbers of batches

    from ddp.by_hand import HandwrittenDistributedDataParallel, NaiveDistributedDataParallel

To use it elsewhere, copy this folder with base.py, sharded.py and backend.py of ddp/all_reduce/, common/errors.py, and
__init__.py and agreement.py of common/distributed/. naive.py needs replicas.py and buckets.py.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp.by_hand.join import JoinableDistributedDataParallel
    from ddp.by_hand.naive import NaiveDistributedDataParallel
    from ddp.by_hand.wrapper import HandwrittenDistributedDataParallel

__all__ = [
    "HandwrittenDistributedDataParallel",
    "JoinableDistributedDataParallel",
    "NaiveDistributedDataParallel",
]

_MODULES = {
    "NaiveDistributedDataParallel": "naive",
    "HandwrittenDistributedDataParallel": "wrapper",
    "JoinableDistributedDataParallel": "join",
}


def __getattr__(name: str) -> Any:
    """Import it when it is first used: a job with torch's DDP, which needs replicas.py, imports none of it."""
    if name == "DistributedDataParallel":
        raise AttributeError(
            "ddp.by_hand has no drop-in for torch's DistributedDataParallel any more: use HandwrittenDistributedDataParallel"
        )
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
