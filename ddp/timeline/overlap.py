"""How much of a step's communication is hidden: what passes while the rank still computes gradients, it need not wait for.

Of each bucket's all-reduce, a rank knows when it has handed the bucket over and when the sum was there. Until the slowest rank
has handed over its own, that is a wait for that rank, and no communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddp.timeline.recording import Step

Interval = tuple[float, float]


@dataclass(frozen=True)
class Parts:
    """Seconds of one step on one rank.

    :param compute: the part of ``backward`` until the last gradient is ready
    :param all_reduce: in which at least one bucket is being summed, which cannot begin before the slowest rank has sent it
    :param hidden: the part of ``all_reduce`` within ``compute``; :param exposed: the other part
    :param waiting: after ``compute``, for slower ranks to send their buckets, while none is summed
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


def divide(ranks: Sequence[Step]) -> list[Parts]:
    """The parts of one step on each rank.

    :param ranks: the same step on all
    """
    moments, parts = sent_by_all(ranks), []
    for step in ranks:
        summing = union((moment, sending.ended) for moment, sending in zip(moments, step.sent, strict=True))
        sending = union((sending.started, sending.ended) for sending in step.sent)
        busy, exposed = length(summing), length(after(step.computed, summing))
        parts.append(
            Parts(
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
    """For each bucket the moment at which the slowest rank has handed it over: no sum can be formed before."""
    return [max(sending.started for sending in bucket) for bucket in zip(*(step.sent for step in ranks), strict=True)]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments in intervals that do not touch, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def after(moment: float, intervals: Iterable[Interval]) -> list[Interval]:
    """What of them is later than ``moment``."""
    return [(max(start, moment), end) for start, end in intervals if end > moment]


def length(intervals: Iterable[Interval]) -> float:
    """Of all together, if they do not overlap."""
    return sum(end - start for start, end in intervals)
