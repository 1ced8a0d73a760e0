"""Learning rates: one schedule step per optimizer step or epoch, and the same rate on all ranks."""

from __future__ import annotations

import itertools
from collections import Counter

from ddp.audit.finding import Finding, Findings
from ddp.audit.trace import Trace, together
from ddp.audit.watch.event_types import LoaderBegins, Schedule, ScheduleMade

LONG = 10  # optimizer steps of a script without loaders
LEAST_IDLE = 3  # optimizer steps in a row with a rate of 0; a warm-up begins with one
IDLE_PART = 0.1  # their part of all steps


def detect(trace: Trace) -> Findings:
    first, ranks = trace.ranks[0], trace.world_size
    is_too_fast = False  # and so it may end long before the run
    for step in first.steps[1:]:
        counts = Counter((event.where, event.id) for event in step.all(Schedule))
        often = [event for event in step.all(Schedule) if counts[event.where, event.id] == ranks]
        if often:
            yield Finding(
                "scheduler-of-each-process",
                often[0],
                f"the schedule takes {ranks} steps for one optimizer step, so it runs {ranks} times too fast",
                is_hint=often[0].of_processes or len(step.passes) == ranks,  # it may count micro-batches
            )
            is_too_fast = not often[0].of_processes
            break
    loaders = first.all(LoaderBegins)
    # A schedule would have been stepped by now.
    is_long = len(first.training) > 1 or (not loaders and len(first.steps) >= LONG)
    stepped = {event.optimizer for event in first.all(Schedule)}
    for event in first.all(ScheduleMade):
        if is_long and event.optimizer not in stepped:
            yield Finding(
                "schedule-never-stepped",
                event,
                f"neither this {event.name} nor another of its optimizer is ever stepped",
                # Rates that change all the same are set by hand; a run without loaders may end before the schedule is meant to begin.
                is_hint=not loaders or len({str(step.before.rates) for step in first.steps}) > 1,
            )
    for events in together(trace.ranks, Schedule):
        metrics = [event.metric for event in events]
        if len(set(metrics)) > 1:
            yield Finding(
                "schedule-decides-by-rank",
                events[0],
                f"{events[0].name} decides on each rank by the rank's own value: {metrics[0]:.4g} on rank 0, {metrics[1]:.4g} on "
                "rank 1",
                diverges=True,
            )
            return
    for steps in trace.steps():
        rates = [step.before.rates for step in steps]
        if min(rates) != max(rates):
            yield Finding(
                "rates-differ", steps[0].before, f"the ranks use different learning rates: {rates}", diverges=True
            )
            return
    for which, steps_of_run in (("first", first.steps), ("last", first.steps[::-1])):
        idle = list(itertools.takewhile(lambda step: max(step.before.rates) == 0, steps_of_run))
        if not is_too_fast and max(LEAST_IDLE, IDLE_PART * len(first.steps)) <= len(idle) < len(first.steps):
            yield Finding(
                "rate-of-zero",
                (idle[0] if which == "first" else idle[-1]).before,
                f"the learning rate is 0 in the {which} {len(idle)} of {len(first.steps)} optimizer steps",
            )
