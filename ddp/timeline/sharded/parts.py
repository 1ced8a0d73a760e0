"""How long each part of a sharded step took on a rank, and how much memory it needed at most.

A gather or a reduce-scatter that runs while the rank computes is hidden. What runs while the rank waits is exposed. The time
until the slowest rank begins the same collective is a wait for that rank, and not communication.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp.timeline.overlap import length, union

if TYPE_CHECKING:
    from ddp.timeline.sharded.recording import ShardedStep

COLLECTIVES = ("gather", "reduce-scatter")
WAITS = ("wait for gather", "wait for reduce-scatter", "wait for flags")


@dataclass(frozen=True)
class ShardedParts:
    """Seconds of one step on one rank, and bytes.

    :param step: all of it
    :param forward: including its waits
    :param backward: including its waits
    :param optimizer: the step of this rank's slice
    :param computing: forward and backward without waits
    :param wait_gather: for parameters
    :param wait_reduce: for gradients, and what the ranks tell each other of them
    :param gather: time in which parameters are gathered, by all ranks
    :param reduce_scatter: time in which gradients are reduced, by all ranks
    :param hidden: time in which either runs and the rank does not wait
    :param exposed: time in which either runs and the rank waits
    :param peak: most bytes of tensors at a time
    :param rest: bytes at the end of the step
    """

    step: float
    forward: float
    backward: float
    optimizer: float
    computing: float
    wait_gather: float
    wait_reduce: float
    gather: float
    reduce_scatter: float
    hidden: float
    exposed: float
    peak: int
    rest: int


def divide(ranks: Sequence[ShardedStep]) -> list[ShardedParts]:
    """Compute the parts of one step on each rank.

    :param ranks: the moments of the same step on each rank
    """
    sending = {kind: begun_by_all(ranks, kind) for kind in COLLECTIVES}
    parts = []
    for step in ranks:
        taken = {
            kind: union((begun, max(begun, span.end)) for begun, span in zip(sending[kind], step.of(kind), strict=True))
            for kind in COLLECTIVES
        }
        waits = {kind: [(span.start, span.end) for span in step.of(kind)] for kind in WAITS}
        waiting, busy = (union(itertools.chain(*kinds.values())) for kinds in (waits, taken))
        exposed = length(waiting) + length(busy) - length(union([*waiting, *busy]))
        parts.append(
            ShardedParts(
                step=step.ended - step.began,
                forward=step.forwarded - step.began,
                backward=step.returned - step.forwarded,
                optimizer=step.ended - step.returned,
                computing=step.returned - step.began - length(waiting),
                wait_gather=length(union(waits["wait for gather"])),
                wait_reduce=length(union([*waits["wait for reduce-scatter"], *waits["wait for flags"]])),
                gather=length(taken["gather"]),
                reduce_scatter=length(taken["reduce-scatter"]),
                hidden=length(busy) - exposed,
                exposed=exposed,
                peak=max(memory.total for memory in step.memory),
                rest=step.memory[-1].total,
            )
        )
    return parts


def begun_by_all(ranks: Sequence[ShardedStep], kind: str) -> list[float]:
    """For each collective of a kind the moment at which the slowest rank begins it."""
    return [max(span.start for span in same) for same in zip(*(step.of(kind) for step in ranks), strict=True)]
