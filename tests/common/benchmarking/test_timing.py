"""common/benchmarking/timing.py: the order in which variants run, and the statistics of their times."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.benchmarking.timing import Spread, interleave, paired_ratio, share_of_limit

times = st.floats(1e-6, 1e6)


def counting(names: str, calls: list[str]) -> dict[str, Callable[[], float]]:
    """Variants that record their calls; each returns the number of the call as its time."""

    def variant(name: str) -> Callable[[], float]:
        def run() -> float:
            calls.append(name)
            return float(len(calls))

        return run

    return {name: variant(name) for name in names}


def test_variants_take_turns_in_an_order_that_rotates() -> None:
    calls: list[str] = []
    interleave(counting("abc", calls), rounds=3, warmup=1)
    assert "".join(calls) == "abcbcacababc"


@pytest.mark.parametrize("warmup", [0, 1, 2])
def test_the_warm_up_does_not_count_and_rounds_stay_in_order(warmup: int) -> None:
    seconds = interleave(counting("a", []), rounds=3, warmup=warmup)
    assert seconds == {"a": [warmup + 1.0, warmup + 2.0, warmup + 3.0]}


@given(st.lists(times, min_size=2, max_size=30))
def test_a_spread_is_numpys_median_and_quartiles(values: list[float]) -> None:
    spread = Spread.of(values)
    expected = np.quantile(values, [0.25, 0.5, 0.75])
    np.testing.assert_allclose([spread.low, spread.median, spread.high], expected, rtol=1e-9)


def test_a_spread_formats_its_three_numbers_alike() -> None:
    assert f"{Spread(median=1.0, low=0.98765, high=1.5):.3f}" == "1.000 [0.988 to 1.500]"


def test_a_ratio_that_may_be_1_tells_neither_faster() -> None:
    assert Spread(1.19, 0.98, 1.3).within_noise()
    assert not Spread(1.19, 1.1, 1.3).within_noise()
    assert Spread(1.19, 1.1, 1.3).within_noise(0.2)
    assert not Spread(0.7, 0.6, 0.75).within_noise(0.2)


def test_more_than_the_limit_is_a_doubt_and_no_result() -> None:
    assert share_of_limit(0.9) == "90%"
    assert "%" not in share_of_limit(2.3)


@given(st.lists(st.tuples(times, st.floats(0.1, 10)), min_size=2, max_size=30))
def test_noise_that_affects_both_in_a_round_cancels(rounds: list[tuple[float, float]]) -> None:
    reference = [noise for noise, _ in rounds]
    ratios = paired_ratio([noise * ratio for noise, ratio in rounds], reference)
    expected = Spread.of([ratio for _, ratio in rounds])
    np.testing.assert_allclose(
        [ratios.low, ratios.median, ratios.high], [expected.low, expected.median, expected.high], rtol=1e-9
    )
