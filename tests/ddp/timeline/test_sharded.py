"""``python -m ddp.timeline --strategy zero3``: the order of what a sharded step does, its memory, and the files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from ddp.timeline import __main__ as timeline
from ddp.timeline.config import StepTimelineConfig
from ddp.timeline.sharded import measure
from ddp.timeline.sharded.memory import Memory
from ddp.timeline.sharded.parts import divide
from ddp.timeline.sharded.recording import ROOT, ShardedStep, Span
from tests.support.launch import run_command
from tests.support.user_errors import UserError

SMALL = ("--width", "64", "--layers", "5", "--length", "8", "--batch-size", "2", "--steps", "2")


def from_json(moments: dict[str, Any]) -> ShardedStep:
    """The step that was written."""
    spans, memory = [Span(**one) for one in moments["spans"]], [Memory(**one) for one in moments["memory"]]
    return ShardedStep(**{**moments, "spans": spans, "memory": memory})


def check_order(step: ShardedStep, units: dict[str, int]) -> None:
    """A unit is gathered before it runs, and freed after, in forward and again in backward; gradients are reduced before the end."""
    for unit in units:
        mine = {
            kind: [span for span in step.of(kind) if span.unit == unit]
            for kind in ("gather", "forward", "backward", "free")
        }
        moments = [(span.end if kind == "gather" else span.start, kind) for kind in mine for span in mine[kind]]
        in_order = [kind for kind, _ in itertools.groupby(kind for _, kind in sorted(moments))]
        if unit == ROOT:  # it stays whole in between
            assert in_order == ["gather", "forward", "backward", "free"]
            continue
        assert in_order == ["gather", "forward", "free", "gather", "backward", "free"]
        assert mine["forward"][0].end <= mine["free"][0].start
        (reduced,) = [span for span in step.of("reduce-scatter") if span.unit == unit]
        assert mine["backward"][0].start < reduced.start < reduced.end < step.returned
    assert [span.unit for span in step.of("reduce-scatter")] == [*reversed(units)]
    computing = step.of("forward", "backward", "optimizer")
    assert all(before.end == after.start for before, after in itertools.pairwise(computing))
    assert step.began < computing[0].start
    assert step.forwarded < step.returned < step.ended == computing[-1].end


def check_memory(step: ShardedStep, units: dict[str, int], replica: int) -> None:
    """At most two blocks are whole at a time; without them, two ranks hold half of a replica each."""
    blocks, block = list(units)[1:], max(units.values())
    for memory in step.memory:
        assert memory.total < replica
        assert sum(memory.parameters[unit] > 0 for unit in blocks) <= 2
        assert sum(memory.parameters.values()) + memory.parameter_slices < sum(units.values())
        # Two are reduced while a third is computed, of which autograd has one parameter's apart.
        assert sum(memory.gradients.values()) <= units[ROOT] + 3.5 * block
    assert max(memory.total for memory in step.memory) > step.memory[0].total + 2 * block
    for memory in (step.memory[0], step.memory[-1]):
        assert not any(memory.parameters.values())
        assert not any(memory.gradients.values())
        assert memory.total == pytest.approx(replica / 2, rel=0.01)


@pytest.mark.examples
def test_a_step_of_stage_3(tmp_path: Path) -> None:
    done = run_command("ddp.timeline", "--strategy", "zero3", *SMALL, "--output", str(tmp_path), timeout_s=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "zero3, a transformer of 0.3 M parameters in 6 units, 2 sequences of 8 tokens, 2 ranks"
    )
    for words in ("rank 1", "waits for gathers", "memory of a rank, without activations: at most", "median duration"):
        assert words in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"timeline.png", "trace.json", "steps.json"}
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "steps.json").read_text())
    assert written["replica"] == 4 * sum(written["units"].values())
    steps = [[from_json(rank["moments"]) for rank in step] for step in written["steps"]]
    assert len(steps) == len(steps[0]) == 2
    for ranks, its in zip(steps, written["steps"], strict=True):
        for step in ranks:
            check_order(step, written["units"])
            check_memory(step, written["units"], written["replica"])
        for kind in ("gather", "reduce-scatter"):  # none is over before every rank has begun it
            for same in zip(*(step.of(kind) for step in ranks), strict=True):
                assert max(span.start for span in same) < min(span.end for span in same)
                assert len({span.unit for span in same}) == 1
        for rank in its:
            parts = rank["parts"]
            assert parts["forward"] + parts["backward"] + parts["optimizer"] == pytest.approx(parts["step"])
            assert 0 <= parts["exposed"] <= parts["wait_gather"] + parts["wait_reduce"] + 1e-9
            assert parts["peak"] > parts["rest"]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    assert sum(event["ph"] == "C" for event in events) == sum(len(rank.memory) for step in steps for rank in step)


def test_a_step_of_stage_1_frees_nothing() -> None:
    small: dict[str, Any] = {"width": 64, "layers": 2, "length": 8, "batch_size": 2, "steps": 2}
    run = measure(StepTimelineConfig(strategy="zero1", all_reduce="shared-memory", **small))
    for step in itertools.chain(*run.steps):
        assert not step.of("free")
        assert {span.unit for span in step.of("gather")} == set(run.units)
        assert max(span.end for span in step.of("gather")) < step.forwarded
        last = max(span.end for span in step.of("backward") if span.unit != ROOT)
        assert all(last < span.start < step.returned for span in step.of("reduce-scatter"))
        for memory in step.memory:  # the slices lie in what is whole
            assert memory.parameter_slices == memory.gradient_slices == 0
            assert sum(memory.parameters.values()) >= sum(run.units.values())


def test_what_runs_while_the_rank_waits_is_exposed() -> None:
    def a_step(gather: tuple[float, float]) -> ShardedStep:
        spans = [
            *(Span("gather", "a", *gather), Span("wait for gather", "a", 1, 4), Span("forward", "a", 4, 6)),
            *(Span("reduce-scatter", "a", 7, 9), Span("wait for flags", "a", 9, 10)),
        ]
        return ShardedStep(0, 6, 10, 11, spans, [Memory(0, 1, 2, 3, {"a": 4}, {"a": 5}), Memory(8, 1, 2, 3, {}, {})])

    early, late = divide([a_step((0, 4)), a_step((2, 3))])
    assert (early.gather, late.gather) == (2, 1)  # since the late rank has begun
    assert (early.exposed, early.hidden, late.exposed, late.hidden) == (2, 2, 1, 2)
    assert (early.computing, early.wait_gather, early.wait_reduce) == (6, 3, 1)
    assert (early.peak, early.rest) == (15, 6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--strategy", "zero4"), "--strategy: invalid choice: 'zero4'"),
        (("--strategy", "zero3", "--model", "mlp"), "--model mlp is for --strategy handwritten"),
        (("--strategy", "zero1", "--bucket-mib", "1"), "--bucket-mib 1.0 is for --strategy handwritten"),
        (("--layers", "2"), "--layers 2 is for the sharded strategies, zero1, zero2, zero3"),
        (
            ("--strategy", "zero2", "--all-reduce", "tree"),
            "--all-reduce tree has no reduce-scatter and all-gather for --strategy zero2",
        ),
        (("--strategy", "zero3", "--ranks", "5"), "--batch-size 12 does not divide over 5 ranks"),
        (("--strategy", "zero3", "--width", "100"), "--width 100 is no multiple of 64"),
    ],
)
def test_a_mistake_is_one_line(user_error: UserError, arguments: tuple[str, ...], words: str) -> None:
    assert words in user_error(timeline.main, *arguments)
