"""Findings that cost time and change no number: hints, which are no failures."""

from __future__ import annotations

from collections import Counter

from ddp.audit.detectors.averages import changes_weights
from ddp.audit.finding import Finding, Findings
from ddp.audit.trace import Trace
from ddp.audit.watch.event_types import Forward


def detect(trace: Trace) -> Findings:
    for step in trace.ranks[0].steps[1:2]:
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
