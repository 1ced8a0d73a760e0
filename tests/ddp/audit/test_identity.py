"""Samples, data sets, calls, steps and ranks' events are told apart by what they are, and not by where they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp.audit.trace import RankTrace, Trace, together
from ddp.audit.watch.event_types import BeforeStep, Draw, Stepped
from tests.ddp.audit import scripts
from tests.ddp.audit.forked import judge

END = "\ndist.destroy_process_group()\n"


@pytest.mark.examples
@pytest.mark.parametrize("what", scripts.IDENTITIES)
def test_a_right_script_is_quiet(tmp_path: Path, what: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(scripts.LABELED + scripts.IDENTITIES[what] + END)
    assert judge(tmp_path, path) == []


@pytest.mark.examples
def test_an_optimizer_that_is_never_cleared_is_found_beside_one_that_is(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(scripts.LABELED + scripts.NEVER_CLEARED + END)
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "other.step()" in text)
    assert [(one.name, one.where) for one in judge(tmp_path, path)] == [("gradients-not-cleared", f"{path}:{line}")]


def _draws(*lines: int) -> list[Draw]:
    return [
        Draw(function="rand", shape=[2], checksum=number, where=f"a.py:{line}") for number, line in enumerate(lines)
    ]


def test_a_draw_of_one_rank_alone_shifts_no_others() -> None:
    ranks = [RankTrace(list(_draws(*lines)), rank, []) for rank, lines in enumerate(([1, 9, 1, 2], [1, 1, 2]))]
    pairs = [tuple((draw.where, draw.checksum) for draw in pair) for pair in together(ranks, Draw)]
    assert pairs == [
        (("a.py:1", 0), ("a.py:1", 0)),
        (("a.py:1", 2), ("a.py:1", 1)),
        (("a.py:2", 3), ("a.py:2", 2)),
    ]


def test_a_step_of_one_rank_alone_shifts_no_others() -> None:
    def steps(*lines: int) -> list[BeforeStep | Stepped]:
        ends = Stepped(parameters={}, sharded=False)
        begins = {
            "own": ["0"],
            "scaler": False,
            "rates": [0.1],
            "without_gradient": [],
            "gradients": {},
            "parameters": {},
        }
        return [one for line in lines for one in (BeforeStep(where=f"a.py:{line}", **begins), ends)]  # type: ignore[arg-type]

    ranks = [RankTrace(list(steps(*lines)), rank, []) for rank, lines in enumerate(([5, 1, 5, 1], [1, 1]))]
    found = list(Trace(ranks, [], {}).steps())
    assert [[step.before.where for step in pair] for pair in found] == [["a.py:1", "a.py:1"]] * 2
