"""An evaluation counts each sample once, over all ranks, with the model in evaluation mode."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from ddp.audit.detectors.finding import Finding
from ddp.audit.trace import Epoch, Trace, epochs

CHAPTER = "ddp/README.md, chapter 8"


def detect(trace: Trace) -> Iterator[Finding]:
    for rank in trace.ranks[:1]:
        for event in rank.all("evaluation"):
            if event["training"] and event["random"]:
                yield Finding(
                    f"a forward pass without gradients runs in training mode, though the model has {event['random']}",
                    "Call model.eval() before the evaluation, and model.train() after it",
                    event,
                    CHAPTER,
                    rank.rank,
                )
        passes = rank.all("forward", "backward")
        for forward, backward in itertools.pairwise(passes):
            if not forward.get("training", True) and forward["layer"] and backward["kind"] == "backward":
                yield Finding(
                    f"the model trains in evaluation mode, in which {forward['layer']} does nothing, or does not learn",
                    "Call model.train() before each epoch of training",
                    forward,
                    CHAPTER,
                    rank.rank,
                )
                break
    if trace.world_size < 2:
        return
    for events in zip(*(rank.all("evaluation") for rank in trace.ranks), strict=False):
        if len({str(event["buffers"]) for event in events}) > 1:
            yield Finding(
                "the ranks evaluate with different buffers, such as BatchNorm's statistics",
                "Average them over the ranks before the evaluation, or send rank 0's; or evaluate with the DDP wrapper",
                events[0],
                CHAPTER,
            )
            break
    evaluations = [
        [epoch for epoch in epochs(rank) if epoch.begin["evaluates"] and not epoch.trains] for rank in trace.ranks
    ]
    for of_ranks in zip(*evaluations, strict=False):
        if found := _twice(of_ranks) or _part(of_ranks):
            yield found
            return


def _twice(of_ranks: tuple[Epoch, ...]) -> Finding | None:
    begin, samples = of_ranks[0].begin, [epoch.samples for epoch in of_ranks]
    if any(one is None for one in samples) or all(one == samples[0] for one in samples):
        return None
    if not any(event["kind"] == "collective" and event["name"].endswith("reduce") for event in of_ranks[0].after):
        return None  # what is gathered may be cut to the right length
    counts = Counter(sample for own in samples for sample in own or ())
    total = sum(counts.values())
    if all(epoch.ended for epoch in of_ranks) and total > len(counts):
        return Finding(
            f"the evaluation counts {total} samples, of which {len(counts)} are different: {begin['sampler']} gives some to several ranks",
            "Evaluate range(rank, n, world_size) on each rank, and sum correct answers and counts over the ranks",
            begin,
            CHAPTER,
        )
    return None


def _part(of_ranks: tuple[Epoch, ...]) -> Finding | None:
    first = of_ranks[0]
    samples = first.samples
    if samples is None or first.begin["length"] is None or not first.ended:
        return None
    part = len(set(samples))
    sends = any(event["kind"] == "collective" and event["name"] != "barrier" for event in first.after)
    covered = len({sample for epoch in of_ranks for sample in epoch.samples or ()})
    if part == first.begin["length"]:
        return None
    if all(epoch.samples == samples for epoch in of_ranks) and sends:
        return Finding(
            f"all ranks evaluate the same {part} of {first.begin['length']} samples, and the others are left out",
            "Evaluate range(rank, n, world_size) on each rank, and sum correct answers and counts over the ranks",
            first.begin,
            CHAPTER,
        )
    if covered > part and not sends:
        return Finding(
            f"rank 0 evaluates {part} of {first.begin['length']} samples, and nothing is summed over the ranks afterwards",
            "All-reduce the correct answers and the counts, and divide then",
            first.begin,
            CHAPTER,
            0,
        )
    return None
