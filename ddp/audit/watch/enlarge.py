"""Batches as large as those of all ranks together: on one rank, put in where the script makes its loaders."""

from __future__ import annotations

import inspect
import json
import os

from torch.utils import data

from .events import Call, Look, watch, where

# The factor, and for each line that makes a loader, its batch sizes on several ranks.
FACTOR, SIZES = json.loads(os.environ.get("DDP_AUDIT_BATCHES") or "[1, {}]")


def enlarge(call: Call) -> Look:
    """The only watcher that changes a call."""
    given = inspect.signature(call.function).bind(*call.args, **call.kwargs)
    arguments = given.arguments
    batches = next((arguments[name] for name in ("batch_sampler", "sampler") if arguments.get(name) is not None), None)
    if type(batches) is data.BatchSampler:
        batches.batch_size = _size(batches.batch_size)
    elif arguments.get("batch_sampler") is None:
        arguments["batch_size"] = _size(arguments.get("batch_size", 1))
    call.args, call.kwargs = given.args, given.kwargs
    yield


def _size(size: int) -> int:
    """A loader that a library makes anew has the larger size already, and so has one whose script divides a global batch."""
    return size * FACTOR if size in SIZES.get(where(), ()) else size


if FACTOR > 1:
    watch(data.DataLoader, "__init__")(enlarge)
