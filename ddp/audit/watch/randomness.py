"""Random numbers that the script itself draws between two optimizer steps, such as noise and time steps."""

from __future__ import annotations

from collections import Counter

import torch

from . import events
from .event_types import Draw
from .events import Call, Look, called_by_script, emit, watch
from .tensors import checksum

MOST_DRAWS = 8  # that are written down for a step
_draws = Counter[int]()  # by step


@watch(torch, "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli")
def draw(call: Call) -> Look:
    yield
    function, drawn = call.function, call.result
    if called_by_script():
        _draws[events.steps] += 1
        if _draws[events.steps] <= MOST_DRAWS and drawn.dim():
            emit(Draw(function=function.__name__, shape=drawn.shape, checksum=checksum(drawn)))
