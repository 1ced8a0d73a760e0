"""``python -m ddp.bench strategies``."""

from __future__ import annotations

import pytest

from common.reporting.timing import Spread
from ddp.bench import __main__ as bench
from ddp.bench.step_parts import StepParts
from ddp.bench.strategies import CAUSES, ONE, SINGLE, Config, as_fast, lost, strategies
from tests.support.user_errors import UserError


def test_the_causes_add_up_to_what_is_lost() -> None:
    single = [StepParts(0.1, 0.7, 0, 0, 0.2), StepParts(0.1, 0.9, 0, 0, 0.2)]
    two = [StepParts(0.06, computing, 0.03, 0.05, 0.2) for computing in (0.4, 0.4, 0.5)]
    causes = lost(two, single, 2)
    assert sum(causes.values()) == pytest.approx(0.74 - 1.1 / 2)
    assert causes[CAUSES["communication"]] == pytest.approx(0.05)
    assert causes[CAUSES["input"]] == pytest.approx(0.06 - 0.05)
    assert causes[CAUSES["update"]] == pytest.approx(0.2 - 0.1)  # each rank updates all parameters: nothing was divided


def test_what_is_within_the_noise_is_as_fast() -> None:
    """DDP in one process cannot be faster than the same without: what it seems to gain is the noise of the others."""
    quiet = {SINGLE: Spread(1, 1, 1), "DDP, 2 processes": Spread(1.15, 1.1, 1.2), "dataparallel": Spread(1, 0.9, 1.2)}
    assert as_fast(quiet) == {SINGLE, "dataparallel"}
    assert as_fast(quiet | {ONE: Spread(0.96, 0.95, 0.965)}) == {SINGLE, "dataparallel"}
    assert as_fast(quiet | {ONE: Spread(1.19, 1.15, 1.25)}) == {*quiet, ONE}


def test_the_strategies_on_cpus() -> None:
    """On CPUs, DDP is compared with each number of processes, and DataParallel with the largest."""
    config = Config(device="cpu", processes=(4, 1, 2))
    names = [strategy.name for strategy in strategies(config)]
    assert names[-3:] == ["DDP, 1 process", "DDP, 2 processes", "DDP, 4 processes"]
    assert names[2] == "dataparallel, 4 CPU devices"
    assert len(strategies(Config(device="cpu", processes=(1,)))) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--batch-size", "145", "--processes", "1,2"), "--batch-size 145 does not divide"),
        (("--device", "cuda", "--processes", "1,64"), "usable"),
    ],
)
def test_a_mistake_is_one_line(user_error: UserError, arguments: tuple[str, ...], words: str) -> None:
    assert words in user_error(bench.main, "strategies", *arguments)
