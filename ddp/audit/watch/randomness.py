"""Random numbers that the script itself draws between two optimizer steps, such as noise and time steps."""

from __future__ import annotations

import pickle
import random
import zlib
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from . import events
from .event_types import Draw, Seed
from .events import Call, Look, called_by_script, emit, watch
from .tensors import checksum

MOST_DRAWS = 8  # that are written down for a step
_draws = Counter[int]()  # by step
_states = Counter[Callable[[], torch.Tensor]]()  # checksums of torch's generators when they were looked at
_changes = 0  # how often one of them was another one


@watch(np.random, "seed")
@watch(random, "seed")
def seed(call: Call) -> Look:
    emit(Seed())
    yield


def of_main_process() -> list[int]:
    """Checksums of NumPy's and Python's generators."""
    return [zlib.crc32(pickle.dumps(state)) for state in (np.random.mtrand._rand, random._inst)]


def _generators() -> list[Callable[[], torch.Tensor]]:
    """Functions that give the states of torch's generators. The last is that from which a module draws."""
    return [torch.get_rng_state] + [torch.cuda.get_rng_state] * torch.cuda.is_available()


def draws() -> int:
    """How often a generator was found changed, but for dropout with a probability of 0, which draws all the same."""
    global _changes
    for generator in _generators():
        state = checksum(generator())
        _changes += state != _states[generator]
        _states[generator] = state
    return _changes


@watch(F, "dropout")
def dropout(call: Call) -> Look:
    generator = _generators()[-1]
    before = checksum(generator())
    yield
    if call.get("p") == 0 and _states[generator] == before:
        _states[generator] = checksum(generator())


@watch(torch, "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli")
def draw(call: Call) -> Look:
    yield
    function, drawn = call.function, call.result
    if called_by_script():
        _draws[events.steps] += 1
        if _draws[events.steps] <= MOST_DRAWS and drawn.dim():
            emit(Draw(function=function.__name__, shape=drawn.shape, checksum=checksum(drawn)))
