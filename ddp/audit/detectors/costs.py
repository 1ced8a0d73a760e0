"""What costs time and changes no number: hints, which are no failures."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

from ddp.audit.detectors.finding import Finding
from ddp.audit.trace import Event, Step, Trace

CHAPTER = "ddp/README.md, chapter 5"


def detect(trace: Trace) -> Iterator[Finding]:
    first = trace.ranks[0]
    for text, cure, event in (
        *map(_passes, first.steps[1:2]),
        _workers(first.all("epoch"), trace.world_size),
    ):
        if event:
            yield Finding(text, cure, event, CHAPTER, is_hint=True)


def _passes(step: Step) -> tuple[str, str, Event]:
    """Micro-steps of which each averages the gradients, or BatchNorm's statistics."""
    lines = Counter(event["where"] for event in step.all("forward") if event["synchronizes"])
    forward = step.last("forward")
    if max(lines.values(), default=0) > 1:
        return (
            f"{max(lines.values())} micro-batches of one step average the gradients over the ranks, and one pass would do",
            "Put forward and backward of all micro-batches but the last under no_sync()",
            forward,
        )
    is_many = len(step.all("forward")) > 1
    return (
        "SyncBatchNorm averages its statistics over the ranks in each micro-batch",
        "Take larger micro-batches, or GroupNorm, which needs no averages",
        forward if is_many and forward.get("synchronizes_batchnorm") else {},
    )


def _workers(loaders: list[Event], ranks: int) -> tuple[str, str, Event]:
    cores = os.cpu_count() or 1
    crowded = [event for event in loaders if event["workers"] * ranks > cores]
    return (
        f"{ranks} ranks have {crowded[0]['workers'] if crowded else 0} loader workers each, and this machine has {cores} cores",
        "Where the ranks of a node share its cores, divide the workers by the ranks",
        crowded[0] if crowded else {},
    )
