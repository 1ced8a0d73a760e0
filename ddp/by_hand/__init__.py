"""DistributedDataParallel by hand, from the simplest form that is right to everything that torch's does.

naive.py      after backward, one all-reduce per parameter
wrapper.py    THE LESSON: buckets that are averaged while backward goes on. It stands on reducer.py (a backward pass),
              buckets.py, replicas.py (equal weights), outputs.py (tensors in an output), running.py (passes within
              passes) and errors.py (refusals), and imports comm_hook.py (compressed communication) when a hook is registered
drop_in/      the lesson with all of torch's arguments and methods, and with Join (uneven inputs)

    from ddp.by_hand import DistributedDataParallel, HandwrittenDistributedDataParallel, NaiveDistributedDataParallel

To use it elsewhere, copy this folder with base.py, sharded.py and backend.py of ddp/all_reduce/, common/errors.py, and
__init__.py and agreement.py of common/distributed/. naive.py needs errors.py, running.py, differing.py, outputs.py and replicas.py.
strategies.py belongs to ddp.train.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp.by_hand.drop_in.wrapper import DistributedDataParallel
    from ddp.by_hand.naive import NaiveDistributedDataParallel
    from ddp.by_hand.strategies import wrap_by_hand
    from ddp.by_hand.wrapper import HandwrittenDistributedDataParallel

__all__ = [
    "DistributedDataParallel",
    "HandwrittenDistributedDataParallel",
    "NaiveDistributedDataParallel",
    "wrap_by_hand",
]

_MODULES = {
    "NaiveDistributedDataParallel": "naive",
    "HandwrittenDistributedDataParallel": "wrapper",
    "DistributedDataParallel": "drop_in.wrapper",
    "wrap_by_hand": "strategies",
}


def __getattr__(name: str) -> Any:
    """Import it when it is first used: a job with torch's DDP, which needs replicas.py, imports none of it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
