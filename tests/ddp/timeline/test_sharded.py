"""``python -m ddp.timeline --strategy zero3``: the order of what a sharded step does, its memory, and the files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from common.reporting.spans import COUNTERS, Span, in_lane
from ddp.timeline.__main__ import measure
from ddp.timeline.config import StepTimelineConfig
from ddp.timeline.parts import COMPUTE, divide, phase
from ddp.timeline.shards import ROOT
from tests.support.launch import run_command

SMALL = ("--batch-size", "2", "--steps", "2")


def check_order(step: list[Span], units: dict[str, int]) -> None:
    """A unit is gathered before it runs, and freed after, in forward and again in backward; gradients are reduced before the end."""
    for unit in units:
        moments = [(span.end, "gather") for span in in_lane(step, "gather") if span.name == unit]
        moments += [(span.start, "free") for span in in_lane(step, "free") if span.name == unit]
        for kind in ("forward", "backward"):
            moments.append((min(span.start for span in step if span.name == f"{kind} {unit}"), kind))
        in_order = [kind for kind, _ in itertools.groupby(kind for _, kind in sorted(moments))]
        if unit == ROOT:  # its forward pass begins with the wait for its parameters, which stay whole in between
            assert in_order == ["forward", "gather", "backward", "free"]
        else:
            assert in_order == ["gather", "forward", "free", "gather", "backward", "free"]
            (reduced,) = [span for span in in_lane(step, "reduce-scatter") if span.name == unit]
            backward = next(span for span in step if span.name == f"backward {unit}")
            assert backward.start < reduced.start < reduced.end < phase(step, "backward").end
    assert [span.name for span in in_lane(step, "reduce-scatter")] == [*reversed(units)]


def check_memory(step: list[Span], units: dict[str, int], replica: int) -> None:
    """At most two blocks are whole at a time; without them, two ranks hold half of a replica each."""
    block = max(units.values())
    memory = [count.facts for count in in_lane(step, COUNTERS)]
    for counts in memory:
        assert sum(counts.values()) < replica
        assert counts["whole parameters"] <= units[ROOT] + 2 * block
        # Two are reduced while a third is computed, of which autograd has one parameter's apart.
        assert counts["whole gradients"] <= units[ROOT] + 3.5 * block
    assert max(sum(counts.values()) for counts in memory) > sum(memory[0].values()) + 2 * block
    for counts in (memory[0], memory[-1]):
        assert counts["whole parameters"] == counts["whole gradients"] == 0
        assert sum(counts.values()) == pytest.approx(replica / 2, rel=0.01)


@pytest.mark.examples
def test_a_step_of_stage_3(tmp_path: Path) -> None:
    """A recorded step of ZeRO-3 gathers, computes, frees and reduces in this order.

    Claim (ddp/sharded/README.md, 4): one step is recorded and drawn: gathered, computed, freed, reduced in this
    order, in less memory than a replica.
    """
    done = run_command("ddp.timeline", "--strategy", "zero3", *SMALL, "--output", str(tmp_path), timeout_s=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "zero3, a transformer of 6.4 M parameters in 9 units, 2 sequences of 64 tokens, 2 ranks"
    )
    assert "memory of a rank, without activations: at most" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"timeline.png", "trace.json", "steps.json"}
    written = json.loads((tmp_path / "steps.json").read_text())
    assert written["replica"] == 4 * sum(written["units"].values())
    steps = [[[Span(**span) for span in rank["spans"]] for rank in step] for step in written["steps"]]
    assert len(steps) == len(steps[0]) == 2
    for ranks, its in zip(steps, written["steps"], strict=True):
        for step in ranks:
            check_order(step, written["units"])
            check_memory(step, written["units"], written["replica"])
        for lane in ("gather", "reduce-scatter"):  # none is over before every rank has begun it
            for same in zip(*(in_lane(step, lane) for step in ranks), strict=True):
                assert max(span.start for span in same) < min(span.end for span in same)
                assert len({span.name for span in same}) == 1
        for rank in its:
            parts = rank["parts"]
            assert 0 <= parts["exposed"] <= parts["waits"] + 1e-9
            assert parts["peak"] > parts["rest"]


def test_a_step_of_stage_1_frees_nothing() -> None:
    run = measure(StepTimelineConfig(strategy="zero1", all_reduce="shared-memory", batch_size=2, steps=2))
    units = run.facts["units"]
    for step in itertools.chain(*run.steps):
        assert not in_lane(step, "free")
        assert {span.name for span in in_lane(step, "gather")} == set(units)
        assert min(span.start for span in in_lane(step, "gather")) > phase(step, "optimizer").start
        last = max(span.end for span in step if span.name.startswith("backward blocks"))
        assert all(last < span.start for span in in_lane(step, "reduce-scatter"))
        for count in in_lane(step, COUNTERS):  # the shards lie in what is whole
            assert count.facts["shards of parameters"] == count.facts["shards of gradients"] == 0
            assert count.facts["whole parameters"] >= sum(units.values())


def test_what_runs_while_the_rank_waits_is_exposed() -> None:
    def a_step(gather: tuple[float, float]) -> list[Span]:
        phases = {"step": (0, 11), "data": (0, 0), "forward": (0, 6), "backward": (6, 10), "optimizer": (10, 11)}
        laps = {"wait for gather": (1, 4), "forward a": (4, 6), "wait for flags": (9, 10)}
        return [
            *(Span(name, *moments, COMPUTE, {}) for name, moments in (phases | laps).items()),
            *(Span("a", *gather, "gather", {}), Span("a", 7, 9, "reduce-scatter", {})),
            *(Span("memory", moment, moment, COUNTERS, {"a": size}) for moment, size in ((0, 15), (8, 6))),
        ]

    early, late = divide([a_step((0, 4)), a_step((2, 3))])
    assert (early["gather"], late["gather"]) == (2, 1)  # since the late rank has begun
    assert [(parts["exposed"], parts["hidden"]) for parts in (early, late)] == [(2, 2), (1, 2)]
    assert (early["compute"], early["waits"]) == (6, 4)
    assert (early["peak"], early["rest"]) == (15, 6)
