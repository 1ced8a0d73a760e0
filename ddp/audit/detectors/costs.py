"""What costs time and changes no number: hints, which are no failures."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

from ddp.audit.detectors.averages import changes_weights
from ddp.audit.detectors.finding import Finding
from ddp.audit.trace import Event, Step, Trace

CHAPTER = "ddp/README.md, chapter 5"


def detect(trace: Trace) -> Iterator[Finding]:
    first = trace.ranks[0]
    for step in first.steps[1:2]:
        yield from _micro_steps(step)
    yield from _workers(first.all("epoch"), trace.world_size)


def _micro_steps(step: Step) -> Iterator[Finding]:
    forwards = step.all("forward")
    averaging = Counter(event["where"] for event in forwards if event["synchronizes"])
    if len(step.all("backward")) < 2 or changes_weights(step):
        return  # one pass for all outputs, or each must be averaged
    if max(averaging.values(), default=0) > 1:
        yield Finding(
            f"{max(averaging.values())} micro-batches of one step average the gradients over the ranks, and one would do",
            "Put forward and backward of all micro-batches but the last under no_sync()",
            forwards[-1],
            CHAPTER,
            is_hint=True,
        )
    elif len(forwards) > 1 and forwards[-1]["synchronizes_batchnorm"]:
        yield Finding(
            "SyncBatchNorm averages its statistics over the ranks in each micro-batch",
            "Take larger micro-batches, or GroupNorm, which needs no averages",
            forwards[-1],
            CHAPTER,
            is_hint=True,
        )


def _workers(loaders: list[Event], ranks: int) -> Iterator[Finding]:
    cores = os.cpu_count() or 1
    for loader in loaders:
        if loader["workers"] * ranks > cores:
            yield Finding(
                f"{ranks} ranks have {loader['workers']} loader workers each, and this machine has {cores} cores",
                "Where the ranks of a node share its cores, divide the workers by the ranks",
                loader,
                CHAPTER,
                is_hint=True,
            )
            return
