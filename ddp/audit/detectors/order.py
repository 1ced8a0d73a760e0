"""Each epoch needs an order of its own, also after a resume."""

from __future__ import annotations

from ddp.audit.finding import Finding, Findings
from ddp.audit.trace import RankTrace, Trace
from ddp.audit.watch.event_types import LoaderEnds


def detect(trace: Trace) -> Findings:
    first = trace.ranks[0]
    yield from _leftover(first)
    orders = [(epoch.begin.dataset, epoch.samples) for epoch in first.training]
    for number, (data, samples) in enumerate(orders):
        before = orders.index((data, samples))
        if before == number or samples == sorted(samples):
            continue
        yield Finding(
            "same-order",
            first.training[number].begin,
            f"epoch {number} gives the {len(samples)} samples in the same order as epoch {before}",
            0,
        )
        return


def _leftover(first: RankTrace) -> Findings:
    """A step that takes backward passes from before an epoch's end and from after it, and more than others take."""
    for step in first.steps:
        ends = [step.events.index(event) for event in step.all(LoaderEnds)]
        left = [one for one in step.passes if ends and step.events.index(one) < ends[0]]
        if left and len(step.passes) > max(len(left), len(first.steps[0].passes)):
            yield Finding(
                "micro-batches-left-over",
                left[0],
                f"{len(left)} micro-batch{'es' * (len(left) > 1)} at an epoch's end: the gradients enter the next one's first step",
                0,
            )
            return
