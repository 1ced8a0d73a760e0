"""Learning rates: one schedule step per optimizer step or epoch, and the same rate on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ddp.audit.detectors.finding import Finding
from ddp.audit.trace import RankTrace, Trace, epochs

CHAPTER = "ddp/README.md, chapter 6"
LONG = 10  # optimizer steps of a script without loaders


def _is_long(rank: RankTrace) -> bool:
    """Whether a schedule would have been stepped by now."""
    return sum(epoch.trains for epoch in epochs(rank)) > 1 or (not rank.all("epoch") and len(rank.steps) >= LONG)


def detect(trace: Trace) -> Iterator[Finding]:
    for step in trace.ranks[0].steps[1:]:
        counts = Counter((event["where"], event["id"]) for event in step.all("schedule"))
        often = [event for event in step.all("schedule") if counts[event["where"], event["id"]] == trace.world_size > 1]
        if often:
            yield Finding(
                f"the schedule takes {trace.world_size} steps for one optimizer step, so it runs {trace.world_size} times too fast",
                "Step it once per optimizer step, on each rank alike: the number of ranks does not matter",
                often[0],
                CHAPTER,
            )
            break
    first = trace.ranks[0]
    stepped = {event["optimizer"] for event in first.all("schedule")}
    for event in first.all("schedule_made"):
        if event["optimizer"] not in stepped and _is_long(first):
            yield Finding(
                f"no {event['schedule']} of this optimizer is ever stepped: the learning rate stays as it is",
                "Call its step() once per epoch or optimizer step, as it is meant",
                event,
                CHAPTER,
            )
            break
    for events in zip(*(rank.all("schedule") for rank in trace.ranks), strict=False):
        metrics = [event.get("metric") for event in events]
        if len(set(metrics)) > 1:
            yield Finding(
                f"{events[0]['schedule']} decides on each rank by the rank's own value: {metrics[0]:.4g} on rank 0, {metrics[1]:.4g} on "
                "rank 1",
                "All-reduce what a decision depends on, so that all ranks decide alike",
                events[0],
                CHAPTER,
                diverges=True,
            )
            return
    for steps in trace.steps():
        rates = [step.last("before_step")["rates"] for step in steps]
        if any(own != rates[0] for own in rates):
            yield Finding(
                f"the ranks use different learning rates: {rates}",
                "Let the rate depend on nothing but the step",
                steps[0].last("before_step"),
                CHAPTER,
                diverges=True,
            )
            return
