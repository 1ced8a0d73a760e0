"""Learning rates: one schedule step per optimizer step or epoch, and the same rate on all ranks. Averages of weights are updated."""

from __future__ import annotations

from collections import Counter

from ddp.audit.detectors.finding import Finding, Findings
from ddp.audit.trace import Trace, epochs, together

CHAPTER = "ddp/README.md, chapter 6"
LONG = 10  # optimizer steps of a script without loaders


def detect(trace: Trace) -> Findings:
    first, ranks = trace.ranks[0], trace.world_size
    for step in first.steps[1:]:
        counts = Counter((event["where"], event["id"]) for event in step.all("schedule"))
        often = [event for event in step.all("schedule") if counts[event["where"], event["id"]] == ranks > 1]
        if often:
            yield Finding(
                f"the schedule takes {ranks} steps for one optimizer step, so it runs {ranks} times too fast",
                "Step it once per optimizer step, on each rank alike: the number of ranks does not matter",
                often[0],
            )
            break
    loaders = first.all("epoch")
    # A schedule would have been stepped by now.
    is_long = sum(epoch.trains for epoch in epochs(first)) > 1 or (not loaders and len(first.steps) >= LONG)
    stepped = {event["optimizer"] for event in first.all("schedule", "average")}
    for event in first.all("schedule_made", "average_made"):
        if is_long and event["optimizer"] not in stepped:
            yield Finding(
                f"neither this {event['schedule']} nor another of its optimizer is ever stepped or updated",
                "Call its step(), or update_parameters(), once per epoch or optimizer step, as it is meant",
                event,
                # It may be meant for later than this run ends.
                is_hint=event["kind"] == "average_made" or not loaders,
            )
    for events in together(trace.ranks, "schedule"):
        metrics = [event["metric"] for event in events]
        if len(set(metrics)) > 1:
            yield Finding(
                f"{events[0]['schedule']} decides on each rank by the rank's own value: {metrics[0]:.4g} on rank 0, {metrics[1]:.4g} on "
                "rank 1",
                "All-reduce what a decision depends on, so that all ranks decide alike",
                events[0],
                diverges=True,
            )
            return
    for steps in trace.steps():
        rates = [step.before["rates"] for step in steps]
        if min(rates) != max(rates):
            yield Finding(
                f"the ranks use different learning rates: {rates}",
                "Let the rate depend on nothing but the step",
                steps[0].before,
                diverges=True,
            )
            return
