"""The parts of a step's time on each rank: computation, waits, and the hidden and the exposed part of communication.

A collective that runs while the rank computes is hidden: the rank does not wait for it. One that runs while the rank waits is exposed. The
time until the slowest rank begins the same collective is a wait for that rank, and not communication.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from common.reporting.spans import COUNTERS, Interval, Span, in_lane, length, overlap, union

COMPUTE = "compute"  # the lane of a rank's phases and laps
COLLECTIVES = ("all-reduce", "gather", "reduce-scatter")  # their lanes

Step = Sequence[Span]
"""The spans of a step on one rank."""

Parts = dict[str, float]
"""Seconds of the parts of a step, of which each kind of strategy has some:

- ``step``, ``data``, ``forward``, ``backward``, ``optimizer``: the phases
- ``waits``: with replicas, for gradients; with shards, for parameters, for gradients, and for flags about these
- ``compute``: backward without waits, with shards forward too
- ``exposed``, ``hidden``: time in which at least one collective runs, and the rank waits or does not
- ``waiting``: waits in which no collective runs, since slower ranks have yet to begin theirs
- ``all_reduce``, ``gather``, ``reduce_scatter``: time in which at least one of them runs

And bytes: ``peak``, the most of tensors at a time, and ``rest``, those at the end of the step.
"""


def divide(ranks: Sequence[Step]) -> list[Parts]:
    """Compute the parts of one step on each rank.

    :param ranks: the same step on each
    """
    begun = {lane: begun_by_all(ranks, lane) for lane in COLLECTIVES if in_lane(ranks[0], lane)}
    return [_divide(step, begun) for step in ranks]


def _divide(step: Step, begun: Mapping[str, Sequence[float]]) -> Parts:
    running = {
        lane: union((moment, max(moment, span.end)) for moment, span in zip(moments, in_lane(step, lane), strict=True))
        for lane, moments in begun.items()
    }
    sent = union((span.start, span.end) for lane in begun for span in in_lane(step, lane))
    busy, waits = union(itertools.chain(*running.values())), waits_of(step)
    exposed = overlap(busy, waits)
    parts = {name: phase(step, name).seconds for name in ("step", "data", "forward", "backward", "optimizer")}
    parts["waits"] = length(waits)
    parts["compute"] = parts["backward"] - parts["waits"]
    parts |= {"exposed": exposed, "hidden": length(busy) - exposed, "waiting": overlap(sent, waits) - exposed}
    parts |= {lane.replace("-", "_"): length(intervals) for lane, intervals in running.items()}
    memory = [sum(count.facts.values()) for count in in_lane(step, COUNTERS)]
    if memory:  # of shards
        parts |= {"compute": parts["compute"] + parts["forward"], "peak": max(memory), "rest": memory[-1]}
    return parts


def begun_by_all(ranks: Sequence[Step], lane: str) -> list[float]:
    """For each collective of a lane the moment at which the slowest rank begins it: none runs before."""
    return [max(span.start for span in same) for same in zip(*(in_lane(step, lane) for step in ranks), strict=True)]


def phase(step: Step, name: str) -> Span:
    """The phase of that name."""
    return next(span for span in in_lane(step, COMPUTE) if span.name == name)


def waits_of(step: Step) -> list[Interval]:
    """When the rank waits. With replicas, all that follows the last gradient counts, also its copy."""
    laps = in_lane(step, COMPUTE)
    copies = [span.start for span in laps if span.name == "copy"]
    waits = [(span.start, span.end) for span in laps if span.name.startswith("wait")]
    return [(copies[-1], waits[-1][1])] if copies else waits
