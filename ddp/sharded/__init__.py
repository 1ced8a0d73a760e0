"""Sharded data parallelism (ZeRO) by hand: optimizer state, gradients and parameters divided over the ranks.

zero1.py         stage 1: the optimizer's state, in equal shards
zero2.py         stage 2: the gradients too
zero3.py         stage 3: the parameters too, gathered unit by unit. They stand on
                 layout.py and flat.py (parameters end to end, cut into shards), units.py (which parameters travel together)
clip.py          the norm of gradients that no rank has whole
protected/       the same stages for programs that write, freeze, convert or copy a model; shard() uses these
stages.py        one call for all stages, and the one that ddp.train takes
fully_shard.py   torch's fully_shard with the same face; equal_batches.py: evaluation

    from ddp.sharded import clip_grad_norm_, shard
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp.sharded.clip import clip_grad_norm_
    from ddp.sharded.stages import shard, shard_network

__all__ = ["clip_grad_norm_", "shard", "shard_network"]

_MODULES = {"clip_grad_norm_": "clip", "shard": "stages", "shard_network": "stages"}


def __getattr__(name: str) -> Any:
    """Import it when it is first used: a job with replicas imports none of it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
