"""Samples, data sets, calls, steps and ranks' events are told apart by what they are, and not by where they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp.audit.trace import RankTrace, Trace, together
from ddp.audit.watch.event_types import (
    Backward,
    BeforeStep,
    Clip,
    Draw,
    Event,
    Loss,
    Scale,
    Stepped,
    Unscale,
    ZeroGrad,
)
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


def _step(line: int, *own: str) -> list[Event]:
    begins = BeforeStep(
        where=f"a.py:{line}",
        own=own,
        scaler=False,
        rates=[0.1],
        without_gradient=[],
        gradients={},
        draws=0,
        generators=[],
        parameters={},
    )
    return [begins, Stepped(parameters={}, sharded=False)]


def _pass(before: dict[str, list[float]], *computed: str) -> list[Event]:
    loss = Loss(call="", samples=4, terms=4, weight=0.25, is_mean=True, probes=[[1.0], [1.0]], share=1.0)
    return [
        loss,
        Backward(before=before, computed={number: [1.0] for number in computed}, loss=1.0, norm=1.0, weights={}),
    ]


def test_a_step_of_one_rank_alone_shifts_no_others() -> None:
    lines = ([5, 1, 5, 1], [1, 1])
    ranks = [RankTrace([one for line in own for one in _step(line, "0")], rank, []) for rank, own in enumerate(lines)]
    found = list(Trace(ranks, [], {}).steps())
    assert [[step.before.where for step in pair] for pair in found] == [["a.py:1", "a.py:1"]] * 2


def test_a_step_has_the_passes_and_clips_of_its_own_parameters() -> None:
    """One pass for two optimizers, of which both are scaled and clipped before both steps; then a pass that is cleared."""
    clips = [
        event
        for number in "01"
        for event in (Unscale(parameters=[number]), Clip(parameters=[number], norm=1.0, limit=1.0))
    ]
    first = _pass({}, "0", "1")
    cleared, other, own = _pass({"1": [1.0]}, "1"), _pass({}, "0"), _pass({}, "1")
    events = [Scale(scale=8.0), *first, *clips, *_step(1, "0"), *_step(2, "1")]
    events += [*cleared, ZeroGrad(), *other, *own, *_step(2, "1")]
    one, two, three = RankTrace(events, 0, []).steps
    for step, number in ((one, "0"), (two, "1")):
        assert (step.passes, step.losses, step.scale) == ([first[1]], [first[0]], 8.0)
        assert [event.parameters for event in step.all(Clip)] == [[number]]
        assert [event.parameters for event in step.all(Unscale)] == [[number]]
    assert (three.passes, three.losses, three.all(Backward)) == ([own[1]], [own[0]], [cleared[1], own[1]])
