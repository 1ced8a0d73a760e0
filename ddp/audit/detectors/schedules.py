"""Learning rates: one schedule step per optimizer step or epoch, and the same rate on all ranks. Averages of weights are updated."""

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


def _late(rank: RankTrace) -> Iterator[Finding]:
    """A warm-up that the script sets by hand, after each step instead of before it: the first step has another rate."""
    steps = [step.last("before_step") for step in rank.steps]
    rates = [step["rates"] for step in steps[:4] if step["where"] == steps[0]["where"]]
    if len(rates) == 4 and rates[0] > rates[1] < rates[2] < rates[3] and not rank.all("schedule_made"):
        yield Finding(
            f"the first step has the rate {rates[0][0]:.4g}, and the warm-up begins at the second, with {rates[1][0]:.4g}",
            "Set the rate of a step before the optimizer takes it",
            steps[0],
            CHAPTER,
        )


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
    stepped = {event["optimizer"] for event in first.all("schedule", "average")}
    for event in first.all("schedule_made", "average_made"):
        if event["optimizer"] not in stepped and _is_long(first):
            is_average = event["kind"] == "average_made"
            yield Finding(
                f"this {event['schedule']} is never updated: it holds the weights with which it was made"
                if is_average
                else f"no {event['schedule']} of this optimizer is ever stepped: the learning rate stays as it is",
                f"Call its {'update_parameters' if is_average else 'step'}() once per epoch or optimizer step, as it is meant",
                event,
                CHAPTER,
                is_hint=is_average or not first.all("epoch"),  # it may be meant for later than this run ends
            )
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
    yield from _late(first)
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
