"""common/benchmarking/turns.py: variants are built in either order and pair up by rounds."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from common.benchmarking.timing import interleave
from common.benchmarking.turns import (
    Rounds,
    calls_of_a_turn,
    cells,
    progress_of,
    ratios,
    stopped_by_ctrl_c,
    table,
    take_turns,
)
from common.distributed.rank_logging import Progress


def test_every_other_build_is_in_reverse_and_warm_up_rounds_do_not_count() -> None:
    built, calls = [], 0

    @contextlib.contextmanager
    def build(names: list[str]) -> Iterator[dict[str, Callable[[], int]]]:
        built.append("".join(names))

        def turn() -> int:
            nonlocal calls
            calls += 1
            return calls

        yield dict.fromkeys(names, turn)

    config = SimpleNamespace(builds=3, rounds=2)
    with progress_of(config, 1) as progress:
        results = take_turns(config, "abc", build, progress, "letters")
    assert built == ["abc", "cba", "abc"]
    assert {name: len(values) for name, values in results.items()} == dict.fromkeys("abc", 6)
    assert min(map(min, results.values())) == 4 and max(map(max, results.values())) == calls == 27


def test_a_long_benchmark_says_how_long_it_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    facts: list[str] = []
    monkeypatch.setattr(Progress, "advance", lambda self, steps, text: facts.append(text))
    rounds = Rounds(7)
    monkeypatch.setattr("common.benchmarking.turns.time.monotonic", lambda: 103.0)
    rounds._began = 100.0
    rounds.advance(1, "letters")
    assert facts == ["letters, about 18 s left"]


def test_ratios_pair_up_by_rounds() -> None:
    times = {"reference": [1.0, 2.0, 4.0], "variant": [2.0, 2.0, 2.0]}
    assert ratios(times, "reference")["variant"] == [2.0, 1.0, 0.5]
    assert cells(times, ".1f", 10)["reference"] == "20.0 [15.0 to 30.0]"


def test_a_row_has_an_empty_cell_where_a_column_lacks_it() -> None:
    lines = table({"ms": {"one": "1.0", "two": "2.0"}, "of": {"two": "2"}}, width=6, first=8)
    assert lines == ["            ms    of", "  one      1.0      ", "  two      2.0     2"]


@pytest.mark.parametrize(("seconds", "calls"), [(1.0, 1), (0.3, 4), (0.01, 128)])
def test_a_turn_is_long_enough(seconds: float, calls: int) -> None:
    assert calls_of_a_turn(lambda _: seconds, 1.0) == calls


def test_ctrl_c_ends_the_measurement_and_keeps_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rounds, "stopped", None)  # and back at the end: a benchmark of a later test would be stopped
    calls: list[int] = []

    def run() -> float:
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        calls.append(1)
        return 1.0

    with stopped_by_ctrl_c(), Rounds(100) as progress:
        seconds = interleave({"a": run}, 100, warmup=1, after_round=lambda: progress.round_done(""))
        assert list(progress.until_stopped([1, 2])) == []
    assert seconds == {"a": [1.0, 1.0]}
