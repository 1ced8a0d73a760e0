"""Random numbers that the script itself draws between two optimizer steps, such as noise and time steps."""

from __future__ import annotations

import pickle
import random
import zlib
from collections import Counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from . import events
from .event_types import Draw, Seed
from .events import Call, Look, called_by_script, emit, watch
from .tensors import checksum

MOST_DRAWS = 8  # that are written down for a step
_draws = Counter[int]()  # by step
_states = dict[Any, int]()  # as they were when they were looked at
_changes = 0  # how often they were found to be others


@watch(np.random, "seed")
@watch(random, "seed")
def seed(call: Call) -> Look:
    emit(Seed())
    yield


def of_main_process() -> list[int]:
    """Checksums of NumPy's and Python's generators."""
    return [zlib.crc32(pickle.dumps(state)) for state in (np.random.mtrand._rand, random._inst)]


def _look() -> dict[Any, int]:
    """Checksums of torch's generators, by the functions that give their states. (Within a module, a stand-in gives its own as both.)"""
    states = [torch.get_rng_state] + [torch.cuda.get_rng_state] * torch.cuda.is_initialized()
    return {state: checksum(state()) for state in states}


def draws() -> int:
    """How often a generator was found changed, but for dropout with a probability of 0, which draws all the same."""
    global _changes
    now = _look()
    _changes += now != _states
    _states.update(now)
    return _changes


@watch(F, "dropout")
def dropout(call: Call) -> Look:
    before = _look()
    yield
    if call.get("p") == 0:
        _states.update({of: state for of, state in _look().items() if before.get(of) == _states.get(of)})


@watch(torch, "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli")
def draw(call: Call) -> Look:
    yield
    function, drawn = call.function, call.result
    if called_by_script():
        _draws[events.steps] += 1
        if _draws[events.steps] <= MOST_DRAWS and drawn.dim():
            emit(Draw(function=function.__name__, shape=drawn.shape, checksum=checksum(drawn)))
