"""``common.randomness``: its hash against SplitMix64, its draws' distribution, and that nothing else has a say in them."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.randomness import derive_seed, hash64, seed_torch, uniform

GAMMA = 0x9E3779B97F4A7C15
# The first outputs of the authors' splitmix64.c for this seed, as Rosetta Code publishes them.
PUBLISHED_SEED = 1234567
PUBLISHED = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]
int64s = st.integers(-(2**63), 2**63 - 1)


def reference_hash(*keys: int | str) -> int:
    """The documented hash in Python's own integers."""
    state = 0
    for key in keys:
        number = zlib.crc32(key.encode()) if isinstance(key, str) else key
        state = ((state ^ (number % 2**64)) + GAMMA) % 2**64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
        state ^= state >> 31
    return state


def chi_square(counts: npt.NDArray[np.int64]) -> tuple[float, float]:
    """The statistic against equal frequencies, and its expectation plus five standard deviations."""
    expected, freedom = counts.sum() / len(counts), len(counts) - 1
    return float(((counts - expected) ** 2 / expected).sum()), freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("step, output", list(enumerate(PUBLISHED)))
def test_one_key_hashes_to_what_splitmix64_publishes(step: int, output: int) -> None:
    assert int(hash64((PUBLISHED_SEED + step * GAMMA) % 2**64)) == output


@given(st.lists(int64s | st.text(max_size=8), max_size=5))
def test_keys_hash_as_in_plain_integer_arithmetic(keys: list[int | str]) -> None:
    assert int(hash64(*keys)) == reference_hash(*keys)


@given(st.integers(0, 9), st.lists(int64s, max_size=6), st.integers(0, 2**32))
def test_a_draw_depends_on_its_keys_and_index_alone(count: int, samples: list[int], seed: int) -> None:
    more = uniform(count + 3, seed, np.array(samples, np.int64))
    assert more.shape == (len(samples), count + 3)
    np.testing.assert_array_equal(uniform(count, seed, np.array(samples, np.int64)), more[:, :count])
    for sample, draws in zip(samples, more, strict=True):
        np.testing.assert_array_equal(uniform(count + 3, seed, sample), draws)


def test_uniform_draws_are_exact_float32_in_the_half_open_unit_interval() -> None:
    draws = uniform(100_000, "range")
    assert draws.dtype == np.float32
    assert 0 <= draws.min() < 1e-4
    assert 1 - 1e-4 < draws.max() < 1
    assert np.all(draws.astype(np.float64) * 2**24 % 1 == 0)


@pytest.mark.parametrize(
    "keys",
    [(0, 0), (np.arange(20_000), 0), (0, np.arange(20_000)), (1, "name", np.arange(20_000) * 4096)],
    ids=["index", "first key", "last key", "strided key"],
)
def test_draws_are_uniform_along_every_coordinate(keys: tuple[int | str | npt.NDArray[np.int64], ...]) -> None:
    count = 1 if any(isinstance(key, np.ndarray) for key in keys) else 20_000
    bins = (uniform(count, *keys).ravel() * 64).astype(np.int64)
    statistic, limit = chi_square(np.bincount(bins, minlength=64))
    assert statistic < limit


@given(st.lists(int64s, max_size=4))
def test_a_derived_seed_is_a_non_negative_63_bit_int_that_torch_takes(keys: list[int]) -> None:
    seed = derive_seed(*keys)
    assert type(seed) is int
    assert 0 <= seed < 2**63
    torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_dropout_is_a_function_of_what_torch_was_seeded_with(name: str) -> None:
    device = torch.device(name)

    def mask(*keys: int, draws_before: int = 0) -> list[float]:
        torch.rand(draws_before, device=device)
        seed_torch(device, *keys)
        kept: list[float] = torch.nn.functional.dropout(torch.ones(256, device=device)).tolist()
        return kept

    with torch.random.fork_rng(devices=[device] if name == "cuda" else []):
        assert mask(0, 5, 1) == mask(0, 5, 1, draws_before=17)
        assert mask(0, 5, 1) != mask(0, 5, 0)
        assert mask(0, 5, 1) != mask(0, 6, 1)
