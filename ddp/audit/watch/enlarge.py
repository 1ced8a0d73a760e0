"""Batches as large as those of all ranks together: on one rank, put in where the script makes its loaders."""

from __future__ import annotations

import functools
import inspect
import json
import os
from typing import Any

from torch.utils import data

from .events import where

# The factor, and for each line that makes a loader, its batch sizes on several ranks.
FACTOR, SIZES = json.loads(os.environ.get("DDP_AUDIT_BATCHES") or "[1, {}]")


def _enlarge(initialize: Any) -> Any:
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def enlarged(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        arguments = given.arguments
        batches = next(
            (arguments[name] for name in ("batch_sampler", "sampler") if arguments.get(name) is not None), None
        )
        if type(batches) is data.BatchSampler:
            batches.batch_size = _size(batches.batch_size)
        elif arguments.get("batch_sampler") is None:
            arguments["batch_size"] = _size(arguments.get("batch_size", 1))
        initialize(*given.args, **given.kwargs)

    return enlarged


def _size(size: int) -> int:
    """A loader that a library makes anew has the larger size already, and so has one whose script divides a global batch."""
    return size * FACTOR if size in SIZES.get(where(), ()) else size


if FACTOR > 1:
    data.DataLoader.__init__ = _enlarge(data.DataLoader.__init__)  # type: ignore[method-assign]
