"""Stateless randomness: every draw is a pure function of integers such as (seed, epoch, sample).

A generator with state makes a run depend on its history: on the number of loader workers, on the draws before a restart, on
which rank holds which sample. Here a draw is the hash of its coordinates. So a resumed run needs only integers to continue bit
for bit, and another world size sees the same samples in the same form.

The hash is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014), applied once per coordinate. It is vectorized over numpy arrays: a batch's draws cost microseconds.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Key = int | str | npt.NDArray[np.integer]

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, SplitMix64's gamma
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def hash64(*keys: Key) -> npt.NDArray[np.uint64]:
    """Hash coordinates into 64 well-mixed bits.

    :param keys: integers, names of streams, or integer arrays that broadcast against each other
    :returns: uint64 of the keys' common shape (a 0-d array for scalars)
    """
    state = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        for key in keys:
            state = (state ^ _as_uint64(key)) + _INCREMENT
            state = (state ^ (state >> np.uint64(30))) * _MULTIPLIERS[0]
            state = (state ^ (state >> np.uint64(27))) * _MULTIPLIERS[1]
            state = state ^ (state >> np.uint64(31))
    return np.asarray(state)


def uniform(count: int, *keys: Key) -> npt.NDArray[np.float32]:
    """``count`` draws from [0, 1) for each element of the keys' common shape.

    :returns: float32 of shape ``[*shape, count]``; element ``[..., i]`` depends on the keys and ``i`` alone
    """
    bits = hash64(*(key[..., None] if isinstance(key, np.ndarray) else key for key in keys), np.arange(count))
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)  # 24 bits: every value is exact


def integers(count: int, low: int, high: int, *keys: Key) -> npt.NDArray[np.int64]:
    """``count`` draws from {low, ..., high} (inclusive), at most 2**24 values, for each element of the keys' shape; int64."""
    return low + (uniform(count, *keys) * np.float32(high - low + 1)).astype(np.int64)


def derive_seed(*keys: Key) -> int:
    """One non-negative 63-bit seed from scalar coordinates, to seed a generator with."""
    return int(hash64(*keys)) >> 1


def shuffled(samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """An epoch's order of a data set's samples: that of ``DistributedSampler(seed=derive_seed(seed, "shuffle"))``.

    (The sampler uses seed + epoch: without the hash, runs with the seeds 0 and 1 would share orders, an epoch apart.)

    :returns: int64 ``[samples]``
    """
    import torch  # here: hashing alone does not need it

    generator = torch.Generator().manual_seed(derive_seed(seed, "shuffle") + epoch)
    return torch.randperm(samples, generator=generator).numpy()


def seed_torch(device: torch.device, *keys: Key) -> None:
    """Seed a device's default generator from coordinates.

    Called before each micro-step with (seed, step, micro-step, rank), it makes dropout a function of these alone. (Not by
    ``torch.manual_seed``, which visits every kind of device and formats a stack trace for each that is not in use: a third
    of a millisecond, where this takes 20 microseconds.)
    """
    import torch

    if device.type == "cuda":
        with torch.cuda.device(device):  # torch seeds the current one
            torch.cuda.manual_seed(derive_seed(*keys))
    else:
        torch.default_generator.manual_seed(derive_seed(*keys))


def _as_uint64(key: Key) -> npt.NDArray[np.uint64]:
    if isinstance(key, str):
        key = zlib.crc32(key.encode())
    if isinstance(key, int):
        return np.asarray(key & _MASK, np.uint64)
    return key.astype(np.uint64)
