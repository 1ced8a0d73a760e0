"""Random numbers that the script itself draws between two optimizer steps, such as noise and time steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import events
from .events import called_by_script, emit, quiet, watch, where
from .tensors import checksum

DRAWS = ("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli")
MOST_DRAWS = 8  # that are written down for a step
_step, _draws = -1, 0


def install() -> None:
    for name in DRAWS:
        _watch(name)


def _watch(name: str) -> None:
    @watch(torch, name)
    def draw(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if called_by_script():
            _drawn(name, result)
        return result


@quiet
def _drawn(name: str, result: Tensor) -> None:
    global _step, _draws
    _step, _draws = events.steps, _draws + 1 if _step == events.steps else 0
    if _draws < MOST_DRAWS and result.dim():
        emit("draw", function=name, shape=list(result.shape), checksum=checksum(result), where=where())
