"""ddp.bench.alpha_beta.py: fits against known lines and all other lines; bandwidths against the definition of nccl-tests."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp.bench.alpha_beta import AlphaBeta, bus_bandwidth, shared_memory_limit

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
    assert fit.bandwidth == pytest.approx(1 / beta, rel=1e-9)
    assert fit.mean_error == pytest.approx(0, abs=1e-9)


@given(st.lists(st.floats(1e-6, 1), min_size=len(SIZES), max_size=len(SIZES)), alphas, betas)
def test_no_other_line_is_nearer(seconds: list[float], alpha: float, beta: float) -> None:
    """For all times, also where the best line would fall or begin below 0."""
    fit = AlphaBeta.fit(SIZES, seconds)
    assert fit.alpha >= 0 and fit.beta >= 0
    least = squared_errors(fit.alpha, fit.beta, seconds)
    for other in [
        (alpha, beta),
        (fit.alpha, beta),
        (alpha, fit.beta),
        (fit.alpha * 1.01, fit.beta),
        (fit.alpha, fit.beta * 1.01),
    ]:
        assert least <= squared_errors(*other, seconds) * (1 + 1e-6)


def test_times_that_fall_have_no_bandwidth() -> None:
    """Then alpha alone is left: the sum of 1 / time over the sum of its squares."""
    falling = AlphaBeta.fit([1, 2], [2.0, 0.5])
    assert falling.alpha == pytest.approx(2.5 / 4.25)
    assert falling.beta == 0
    assert falling.bandwidth == math.inf


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_bus_bandwidth_is_that_of_the_links(ranks: int) -> None:
    """A ring over links of a known bandwidth, each step at full speed: 2 (ranks - 1) steps of a ranks-th."""
    size, link = 24_000, 5e9
    seconds = 2 * (ranks - 1) * (size / ranks) / link
    assert bus_bandwidth(size, seconds, ranks) == pytest.approx(link)


def test_the_memory_limit() -> None:
    """Two ranks with 1 GB each: both are read and both are written, 4 GB."""
    assert shared_memory_limit(2, 40e9) == pytest.approx(bus_bandwidth(10**9, 4e9 / 40e9, 2))
