"""Metrics: the numbers that come out of collectives in an evaluation, which must not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ddp.audit.trace import RankTrace, Trace, paired
from ddp.audit.watch.event_types import Backward, Batch, Collective

REDUCTIONS = ("all_reduce", "reduce", "broadcast")
TOLERANCE = 5e-3  # of weights that differ by rounding


@dataclass
class Part:
    """A rank's part of an evaluation: the batches of loaders that do not train, up to the next backward pass.

    :ivar samples: how many it has been given
    """

    samples: int = 0
    reduced: list[Collective] = field(default_factory=list)


def _parts(trace: RankTrace) -> list[Part]:
    parts: list[Part] = []
    is_running = False
    for event in trace.events:
        if isinstance(event, Backward):
            is_running = False
        elif isinstance(event, Batch) and event.iterator not in trace.training_iterators:
            if not is_running:
                parts.append(Part())
            is_running = True
            parts[-1].samples += len(event.indices or event.rows)  # a batch of objects has few rows
        elif isinstance(event, Collective) and is_running and event.name in REDUCTIONS and event.after:
            parts[-1].reduced.append(event)
    return parts


def other_metrics(base: Trace, other: Trace, weights_are_same: bool) -> tuple[Collective | None, str | None]:
    """The first metric that differs between runs on other numbers of ranks, and what is said of all; None if none can be compared.

    :param weights_are_same: whether both have trained to the same weights; if not, only counts of samples are compared
    """
    ours, theirs = ([_parts(rank) for rank in trace.ranks] for trace in (base, other))
    compared = 0
    for number, (mine, yours) in enumerate(zip(ours[0], theirs[0], strict=False)):
        totals = [sum(of_rank[number].samples for of_rank in some if number < len(of_rank)) for some in (ours, theirs)]
        for one, two in paired([[(event.where, event) for event in part.reduced] for part in (mine, yours)]):
            if len(one.after) != len(two.after):
                continue
            is_count = [[a, b] == totals for a, b in zip(one.after, two.after, strict=True)]
            if not (weights_are_same or any(is_count)):
                continue
            compared += 1
            # A sum over ranks may be divided by their number later.
            sums = [[value / scale for value in one.after] for scale in (1, base.world_size / other.world_size)]
            if not any(_equal(values, two.after, is_count, weights_are_same) for values in sums):
                values, others = (", ".join(f"{value:.6g}" for value in some.after) for some in (one, two))
                ranks = f"{other.world_size} rank{'s' * (other.world_size > 1)}"
                return one, f"an evaluation reduces other numbers: {values}, and {others} on {ranks}"
    return None, f"{compared} metrics are equal" if compared else None


def _equal(ours: Sequence[float], theirs: Sequence[float], is_count: Sequence[bool], with_values: bool) -> bool:
    """Whether metrics are equal: counts of samples are, and answers but for one that rounding has changed."""
    for a, b, counts in zip(ours, theirs, is_count, strict=True):
        is_whole = a.is_integer() and b.is_integer() and not counts
        allowed = max(TOLERANCE * max(abs(a), abs(b)), 1.0 * is_whole) * (not counts)
        if (counts or with_values) and abs(a - b) > allowed:
            return False
    return True
