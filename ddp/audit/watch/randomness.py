"""Random numbers that the script itself draws between two optimizer steps, such as noise and time steps."""

from __future__ import annotations

import pickle
import random
import zlib
from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F

from . import events
from .event_types import Draw, Seed
from .events import Call, Look, called_by_script, emit, watch
from .tensors import checksum

MOST_DRAWS = 8  # that are written down for a step
_draws = Counter[int]()  # by step
_state = _changes = 0  # the checksum of torch's generator when it was looked at, and how often it was another one


@watch(np.random, "seed")
@watch(random, "seed")
def seed(call: Call) -> Look:
    emit(Seed())
    yield


def of_main_process() -> list[int]:
    """Checksums of NumPy's and Python's generators."""
    return [zlib.crc32(pickle.dumps(state)) for state in (np.random.mtrand._rand, random._inst)]


def draws() -> int:
    """How often the generator was found changed, but for dropout with a probability of 0, which draws all the same."""
    global _state, _changes
    state = checksum(torch.get_rng_state())
    _changes += state != _state
    _state = state
    return _changes


@watch(F, "dropout")
def dropout(call: Call) -> Look:
    global _state
    draws()
    yield
    if call.get("p") == 0:
        _state = checksum(torch.get_rng_state())


@watch(torch, "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli")
def draw(call: Call) -> Look:
    yield
    function, drawn = call.function, call.result
    if called_by_script():
        _draws[events.steps] += 1
        if _draws[events.steps] <= MOST_DRAWS and drawn.dim():
            emit(Draw(function=function.__name__, shape=drawn.shape, checksum=checksum(drawn)))
