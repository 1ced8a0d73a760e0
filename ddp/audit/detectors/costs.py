"""Findings that cost time and change no number: hints, which are no failures."""

from __future__ import annotations

import os
from collections import Counter

from ddp.audit.detectors.averages import changes_weights
from ddp.audit.finding import Finding, Findings
from ddp.audit.trace import Step, Trace
from ddp.audit.watch.event_types import Forward, LoaderBegins


def detect(trace: Trace) -> Findings:
    first, ranks, cores = trace.ranks[0], trace.world_size, os.cpu_count() or 1
    for step in first.steps[1:2]:
        yield from _micro_steps(step)
    for loader in first.all(LoaderBegins):
        if loader.workers * ranks > cores:
            yield Finding(
                "more-workers-than-cores",
                loader,
                f"{ranks} ranks have {loader.workers} loader workers each, and this machine has {cores} cores",
            )
            return


def _micro_steps(step: Step) -> Findings:
    forwards = step.all(Forward)
    most = max(Counter(event.where for event in forwards if event.synchronizes).values(), default=0)
    if len(step.computed) < 2 or changes_weights(step):
        return  # one pass for all outputs, or each must be averaged
    if most > 1:
        yield Finding(
            "averages-each-micro-batch",
            forwards[-1],
            f"{most} micro-batches of one step average the gradients over the ranks, and one would do",
        )
    elif len(forwards) > 1 and forwards[-1].synchronizes_batchnorm:
        yield Finding("syncbatchnorm-each-micro-batch", forwards[-1])
