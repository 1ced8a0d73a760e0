"""The hidden and the exposed part of a step's communication.

An all-reduce that runs while the rank still computes gradients is hidden: the rank does not wait for it. For each bucket a
rank knows when it started the all-reduce and when that ended. The time until the slowest rank has started its own is a wait
for that rank, and not communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp.timeline.recording import Step

Interval = tuple[float, float]


@dataclass(frozen=True)
class OverlapParts:
    """Seconds of one step on one rank.

    :param compute: the part of ``backward`` until the last gradient is ready
    :param all_reduce: time in which at least one bucket is summed; a sum cannot begin before the slowest rank starts its own
    :param hidden: the part of ``all_reduce`` within ``compute``
    :param exposed: the rest of ``all_reduce``
    :param waiting: after ``compute``, time without any sum, in which slower ranks have yet to start theirs
    """

    step: float
    data: float
    forward: float
    backward: float
    compute: float
    all_reduce: float
    hidden: float
    exposed: float
    waiting: float
    optimizer: float


def divide(ranks: Sequence[Step]) -> list[OverlapParts]:
    """Compute the parts of one step on each rank.

    :param ranks: the moments of the same step on each rank
    """
    moments, parts = sent_by_all(ranks), []
    for step in ranks:
        summing = union((moment, sending.ended) for moment, sending in zip(moments, step.sent, strict=True))
        sending = union((sending.started, sending.ended) for sending in step.sent)
        busy, exposed = length(summing), length(after(step.computed, summing))
        parts.append(
            OverlapParts(
                step=step.ended - step.began,
                data=step.loaded - step.began,
                forward=step.forwarded - step.loaded,
                backward=step.returned - step.forwarded,
                compute=step.computed - step.forwarded,
                all_reduce=busy,
                hidden=busy - exposed,
                exposed=exposed,
                waiting=length(after(step.computed, sending)) - exposed,
                optimizer=step.ended - step.returned,
            )
        )
    return parts


def sent_by_all(ranks: Sequence[Step]) -> list[float]:
    """For each bucket the moment at which the slowest rank starts its all-reduce: no sum begins before."""
    return [max(sending.started for sending in bucket) for bucket in zip(*(step.sent for step in ranks), strict=True)]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals into disjoint ones, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def after(moment: float, intervals: Iterable[Interval]) -> list[Interval]:
    """The parts of the intervals that are later than ``moment``."""
    return [(max(start, moment), end) for start, end in intervals if end > moment]


def length(intervals: Iterable[Interval]) -> float:
    """The total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)
