"""In an epoch of training, every sample must be seen once: by one rank, and by one of its workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ddp.audit.detectors.finding import Finding
from ddp.audit.trace import Epoch, Trace, epochs

CHAPTER = "ddp/README.md, chapter 3"


def detect(trace: Trace) -> Iterator[Finding]:
    yield from _replaced(trace)
    yield from _same(trace)
    if any(rank.all("weighted_order") for rank in trace.ranks):
        return  # samples are drawn with replacement
    training = [[epoch for epoch in epochs(rank) if epoch.trains] for rank in trace.ranks]
    for number, of_ranks in enumerate(zip(*training, strict=False)):
        if found := _repeated(of_ranks, number) or _uneven(of_ranks, number) or _unseen(of_ranks, number):
            yield found
            return


def _same(trace: Trace) -> Iterator[Finding]:
    """Batches of no loader: losses have equal inputs and targets on all ranks, in all steps. Without losses, forward passes tell."""
    if trace.world_size < 2 or any(epoch.trains for epoch in epochs(trace.ranks[0])):
        return
    steps = list(trace.steps())
    first = trace.ranks[0]
    kind, seen = ("loss", "probes") if first.all("loss") else ("forward", "rows")
    losses = [one for of_ranks in steps for one in zip(*(step.all(kind) for step in of_ranks), strict=False)]
    gathered = first.all("put_back") or any(event["requires_grad"] for event in first.all("collective"))
    if len(losses) > 2 and not gathered and all(own[seen] == one[0][seen] != [] for one in losses for own in one):
        yield Finding(
            f"all ranks train on the same samples: the inputs of all {len(losses)} {kind} calls are equal",
            "Give each rank another part of the global batch",
            losses[0][0],
            CHAPTER,
        )


def _repeated(of_ranks: tuple[Epoch, ...], number: int) -> Finding | None:
    """Samples that arrived on several ranks, or twice on one.

    Their contents decide, since ranks may have data sets of their own; or, where they are augmented, all of their labels.
    """
    begin = of_ranks[0].begin
    rows = [row for epoch in of_ranks for row in epoch.rows]
    counts = Counter(rows)
    shared = set.intersection(*(set(epoch.rows) for epoch in of_ranks)) if len(of_ranks) > 1 else set()
    if begin["iterable"]:
        if len(rows) > 1.33 * len(counts) > 0:
            return Finding(
                f"the iterable data set is read {len(rows) / len(counts):.3g} times in epoch {number}: {len(rows)} samples arrive, "
                f"{len(counts)} of them different ({len(of_ranks)} ranks, {begin['workers']} workers each)",
                "Let each rank and worker read its own part: by the rank, and torch.utils.data.get_worker_info()",
                begin,
                CHAPTER,
            )
        return None
    samples = [epoch.samples for epoch in of_ranks]
    if any(one is None for one in samples) or len(of_ranks) < 2:
        return None
    labeled = [epoch.labeled for epoch in of_ranks]
    if all(one == labeled[0] for one in labeled) and len({label for _, label in labeled[0]}) > 1:
        shared, counts = {number for number, _ in labeled[0]}, Counter(samples[0])
    if len(shared) > max(2 * len(of_ranks), len(counts) // 10) and begin["replicas"] is None:
        return Finding(
            f"{len(shared)} of {len(counts)} samples arrive on every rank in epoch {number}: the loader does not divide them",
            "Give the loader a DistributedSampler",
            begin,
            CHAPTER,
        )
    return None


def _uneven(of_ranks: tuple[Epoch, ...], number: int) -> Finding | None:
    counts = [len(epoch.batches) for epoch in of_ranks]
    if len(set(counts)) > 1 and all(epoch.ended for epoch in of_ranks):
        return Finding(
            f"the ranks have {counts} batches in epoch {number}: those with more wait for collectives of the others",
            "Give all ranks the same number of batches, or use DDP's join",
            of_ranks[0].begin,
            CHAPTER,
        )
    return None


def _unseen(of_ranks: tuple[Epoch, ...], number: int) -> Finding | None:
    begin = of_ranks[0].begin
    samples = [epoch.samples for epoch in of_ranks]
    if begin["length"] is None or not all(epoch.ended for epoch in of_ranks) or any(one is None for one in samples):
        return None
    if len({epoch.begin["length"] for epoch in of_ranks}) > 1:
        return None
    seen = {sample for own in samples for sample in own or ()}
    batch = max(len(epoch.batches[0]["indices"]) for epoch in of_ranks)
    missing = begin["length"] - len(seen)
    if missing >= max(batch * len(of_ranks), 2) and seen <= set(range(begin["length"])):
        return Finding(
            f"{missing} of {begin['length']} samples are seen by no rank in epoch {number}",
            "Let the ranks' parts cover the data set: one sampler with the right number of ranks and rank",
            begin,
            CHAPTER,
        )
    return None


def _replaced(trace: Trace) -> Iterator[Finding]:
    for rank in trace.ranks[:1]:
        iterated = {event["sampler"] for event in rank.all("weighted_order")}
        for event in rank.all("weighted_sampler"):
            if event["sampler"] not in iterated and rank.all("epoch"):
                yield Finding(
                    "this WeightedRandomSampler is never iterated: the loader has another sampler, so samples are not weighted",
                    "Draw the weighted order alike on all ranks from (seed, epoch), and let each rank take its part of it",
                    event,
                    CHAPTER,
                )
