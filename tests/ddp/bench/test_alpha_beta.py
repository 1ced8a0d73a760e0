"""ddp/bench/allreduce/alpha_beta.py: fits against known lines and all other lines; bandwidths against the definition of nccl-tests."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp.bench.allreduce.alpha_beta import AlphaBeta, bus_bandwidth, least_shared_memory_seconds

SIZES = tuple(4**power for power in range(1, 14))
alphas = st.floats(1e-7, 1e-2)
betas = st.floats(1e-12, 1e-7)


def squared_errors(alpha: float, beta: float, seconds: list[float]) -> float:
    return math.fsum(((alpha + beta * size) / time - 1) ** 2 for size, time in zip(SIZES, seconds, strict=True))


@given(alphas, betas)
def test_an_exact_line_is_recovered(alpha: float, beta: float) -> None:
    fit = AlphaBeta.fit(SIZES, [alpha + beta * size for size in SIZES])
    assert fit.alpha == pytest.approx(alpha, rel=1e-9)
    assert fit.beta == pytest.approx(beta, rel=1e-9)
    assert fit.seconds(1000) == pytest.approx(alpha + 1000 * beta, rel=1e-9)
    assert fit.bandwidth == pytest.approx(1 / beta, rel=1e-9)
    assert fit.mean_error == pytest.approx(0, abs=1e-9)


@given(st.floats(-7, -3), st.floats(3, 6), st.lists(st.floats(-0.05, 0.05), min_size=len(SIZES), max_size=len(SIZES)))
def test_a_line_is_recovered_from_noise(log_alpha: float, log_knee: float, noise: list[float]) -> None:
    """There are times on both sides of the size at which alpha equals beta * size."""
    alpha, beta = 10**log_alpha, 10 ** (log_alpha - log_knee)
    fit = AlphaBeta.fit(SIZES, [(alpha + beta * size) * (1 + e) for size, e in zip(SIZES, noise, strict=True)])
    assert fit.alpha == pytest.approx(alpha, rel=0.15)
    assert fit.beta == pytest.approx(beta, rel=0.15)
    assert fit.mean_error < 0.1


@given(st.lists(st.floats(1e-6, 1), min_size=len(SIZES), max_size=len(SIZES)), alphas, betas)
def test_no_other_line_is_nearer(seconds: list[float], alpha: float, beta: float) -> None:
    """For all times, also where the best line would fall or begin below 0."""
    fit = AlphaBeta.fit(SIZES, seconds)
    assert fit.alpha >= 0 and fit.beta >= 0
    least = squared_errors(fit.alpha, fit.beta, seconds)
    assert sum(error**2 for error in fit.errors) == pytest.approx(least)
    for other in [
        (alpha, beta),
        (fit.alpha, beta),
        (alpha, fit.beta),
        (fit.alpha * 1.01, fit.beta),
        (fit.alpha, fit.beta * 1.01),
    ]:
        assert least <= squared_errors(*other, seconds) * (1 + 1e-6)


def test_times_that_fall_or_begin_below_zero() -> None:
    """One part is 0, and the other is the best single one: the sum of 1 / time over the sum of its squares."""
    falling = AlphaBeta.fit([1, 2], [2.0, 0.5])
    assert falling.alpha == pytest.approx(2.5 / 4.25)
    assert falling.beta == 0
    assert falling.bandwidth == math.inf
    steep = AlphaBeta.fit([1, 2], [1.0, 8.0])
    assert steep.alpha == 0
    assert steep.beta == pytest.approx(1.25 / 1.0625)


def test_small_and_large_sizes_weigh_the_same() -> None:
    """Two times that disagree by a factor of 2 move either end of the line by the same factor."""
    fit = AlphaBeta.fit([1, 1, 10**12, 10**12], [1.0, 2.0, 1e6, 2e6])
    assert fit.alpha == pytest.approx(1.2, rel=1e-5)
    assert 1e12 * fit.beta == pytest.approx(1.2e6, rel=1e-5)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_bus_bandwidth_is_that_of_the_links(ranks: int) -> None:
    """A ring over links of a known bandwidth, each step at full speed: 2 (ranks - 1) steps of a ranks-th."""
    size, link = 24_000, 5e9
    seconds = 2 * (ranks - 1) * (size / ranks) / link
    assert bus_bandwidth(size, seconds, ranks) == pytest.approx(link)


def test_bus_bandwidth_in_numbers() -> None:
    """nccl-tests multiplies the algorithm's bandwidth by 2 (n - 1) / n."""
    factors = [bus_bandwidth(10**9, 1.0, ranks) / 1e9 for ranks in (2, 3, 4, 8)]
    assert factors == pytest.approx([1, 4 / 3, 1.5, 1.75])


def test_the_memory_limit() -> None:
    """Two ranks with 1 GB each: both are read and both are written, 4 GB."""
    assert least_shared_memory_seconds(10**9, 2, 40e9) == pytest.approx(0.1)
    bandwidths = [bus_bandwidth(size, least_shared_memory_seconds(size, 3, 36e9), 3) for size in (10, 1000)]
    assert np.allclose(bandwidths, 36e9 * 2 / 3**2)
