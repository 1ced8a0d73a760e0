"""All recorded steps of a sharded model in Chrome's trace event format, with the memory as counters."""

from __future__ import annotations

from collections.abc import Sequence

from common.reporting.trace_events import Event, Lane, at, complete, lane_names
from ddp.timeline.sharded.parts import COLLECTIVES, WAITS
from ddp.timeline.sharded.recording import ShardedStep

LANES = ("compute", "gather", "reduce-scatter", "free")


def trace_events(pids: Sequence[int], steps: Sequence[Sequence[ShardedStep]]) -> list[Event]:
    """A process per rank: what it computes above its gathers, reduce-scatters and frees, and its memory.

    :param pids: of each rank
    :param steps: the moments on each rank, in seconds from the beginning of the trace
    """
    events: list[Event] = []
    for rank, pid in enumerate(pids):
        lanes: dict[str, Lane] = {name: (pid, pid + position) for position, name in enumerate(LANES)}
        for position, (name, lane) in enumerate(lanes.items()):
            events += lane_names(lane, f"rank {rank}", name, rank, position)
        for number, step in enumerate(steps):
            events += _step_events(f"step {number + 1}", step[rank], lanes)
    return events


def _step_events(name: str, step: ShardedStep, lanes: dict[str, Lane]) -> list[Event]:
    events = [complete(name, step.began, step.ended, lanes["compute"], "step")]
    for span in step.spans:
        if span.kind in COLLECTIVES or span.kind == "free":
            events.append(complete(span.unit, span.start, span.end, lanes[span.kind], span.kind))
        else:
            words = span.kind if span.kind in (*WAITS, "optimizer") else f"{span.kind} {span.unit}"
            events.append(complete(words, span.start, span.end, lanes["compute"], "part"))
    for memory in step.memory:
        parts = {
            "optimizer state": memory.state,
            "slices of parameters": memory.parameter_slices,
            "slices of gradients": memory.gradient_slices,
            "whole parameters": sum(memory.parameters.values()),
            "whole gradients": sum(memory.gradients.values()),
        }
        events.append({**at(memory.moment, lanes["compute"]), "ph": "C", "name": "memory, bytes", "args": parts})
    return events
