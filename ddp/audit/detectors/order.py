"""Each epoch needs an order of its own, also after a resume."""

from __future__ import annotations

from ddp.audit.detectors.finding import Finding, Findings
from ddp.audit.trace import RankTrace, Trace, epochs
from ddp.audit.watch.event_types import Backward, Event, LoaderEnds, Skipped, Stepped, ZeroGrad


def detect(trace: Trace) -> Findings:
    first = trace.ranks[0]
    yield from _leftover(first)
    training = [epoch for epoch in epochs(first) if epoch.trains]
    orders = [(epoch.begin.dataset, epoch.samples) for epoch in training]
    for number, (data, samples) in enumerate(orders):
        before = orders.index((data, samples))
        if before == number or samples == sorted(samples):
            continue
        yield Finding(
            "same-order",
            training[number].begin,
            f"epoch {number} gives the {len(samples)} samples in the same order as epoch {before}",
            0,
        )
        return


def _leftover(first: RankTrace) -> Findings:
    """Backward passes at an epoch's end that no optimizer step follows: their gradients enter the next epoch's first step."""
    left: list[Event] = []
    over = 0  # how many there are at the epoch's end
    usual = len(first.steps[0].computed) if first.steps else 1
    for event in first.events:
        if isinstance(event, (Stepped, Skipped, ZeroGrad)):
            left, over = [], 0
        elif isinstance(event, Backward):
            if over and len(left) >= usual:  # a loop that counts on from epoch to epoch takes as many as ever
                yield Finding(
                    "micro-batches-left-over",
                    left[0],
                    f"{over} micro-batch{'es' * (over > 1)} at an epoch's end: the gradients enter the next one's first step",
                    0,
                )
                return
            left.append(event)
        elif isinstance(event, LoaderEnds):
            over = over or len(left)
