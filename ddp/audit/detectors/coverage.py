"""In an epoch of training, every sample must be seen once: by one rank, and by one of its workers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ddp.audit.finding import Finding, Findings
from ddp.audit.trace import Epoch, Trace, together
from ddp.audit.watch.event_types import (
    Collective,
    Event,
    Forward,
    LoaderBegins,
    Loss,
    PutBack,
    WeightedMade,
    WeightedOrder,
)


def detect(trace: Trace) -> Findings:
    yield from _replaced(trace)
    training = list(trace.epochs(train=True))
    if not training:
        yield from _same(trace)
    if any(rank.all(WeightedOrder) for rank in trace.ranks):
        return  # samples are drawn with replacement
    for number, of_ranks in enumerate(training):
        for finding in itertools.chain(_repeated(of_ranks, number), _left_out(of_ranks, number)):
            yield finding
            return


def _replaced(trace: Trace) -> Findings:
    first = trace.ranks[0]
    iterated = {event.sampler for event in first.all(WeightedOrder)}
    for event in first.all(WeightedMade):
        if event.sampler not in iterated and first.all(LoaderBegins):
            yield Finding("weights-vanish", event)


def _same(trace: Trace) -> Findings:
    """Batches of no loader: losses have equal inputs and targets on all ranks, in all steps. Without losses, forward passes tell."""
    first = trace.ranks[0]
    kind: type[Event] = Loss if first.all(Loss) else Forward
    calls = [one for steps in trace.steps() for one in together(steps, kind)]
    gathered = first.all(PutBack) or any(event.requires_grad for event in first.all(Collective))
    if len(calls) > 2 and not gathered and all(_seen(own) == _seen(one[0]) != [] for one in calls for own in one):
        yield Finding(
            "same-samples",
            calls[0][0],
            f"all ranks train on the same samples: the inputs of all {len(calls)} {kind.__name__.lower()} calls are equal",
        )


def _seen(event: Event) -> object:
    return event.probes if isinstance(event, Loss) else event.rows if isinstance(event, Forward) else []


def _repeated(of_ranks: Sequence[Epoch], number: int) -> Findings:
    """Samples that arrived on several ranks, or twice on one.

    Their contents decide, since ranks may have data sets of their own; or, where they are augmented, all of their labels.
    """
    begin, ranks = of_ranks[0].begin, len(of_ranks)
    rows = [set(epoch.rows) for epoch in of_ranks]
    shared, different = set.intersection(*rows), set.union(*rows)
    if begin.iterable:
        count = sum(len(epoch.rows) for epoch in of_ranks)
        if count > 1.33 * len(different) > 0:
            yield Finding(
                "read-by-all",
                begin,
                f"the iterable data set is read {count / len(different):.3g} times in epoch {number}: {count} samples arrive, "
                f"{len(different)} of them different ({ranks} ranks, {begin.workers} workers each)",
            )
    elif begin.replicas is None and all(epoch.samples for epoch in of_ranks):
        labeled = [epoch.numbered(targets=True) for epoch in of_ranks]
        if all(one == labeled[0] for one in labeled) and len({label for _, label in labeled[0]}) > 1:
            shared = different = set(dict(labeled[0]))
        if len(shared) > max(2 * ranks, len(different) // 10):
            yield Finding(
                "samples-on-every-rank",
                begin,
                f"{len(shared)} of {len(different)} samples arrive on every rank in epoch {number}: the loader does not divide them",
            )


def _left_out(of_ranks: Sequence[Epoch], number: int) -> Findings:
    """Batches that some ranks do not have, and samples that no rank has."""
    begin, counts = of_ranks[0].begin, [len(epoch.batches) for epoch in of_ranks]
    if not all(epoch.is_whole for epoch in of_ranks):
        return
    if len(set(counts)) > 1:
        yield Finding(
            "uneven-batches",
            begin,
            f"the ranks have {counts} batches in epoch {number}: those with more wait for collectives of the others",
        )
    length, samples = begin.length, [epoch.samples for epoch in of_ranks]
    if not length or not all(samples) or any(epoch.begin.length != length for epoch in of_ranks):
        return
    if any(len(set(own)) < len(own) for own in samples):
        return  # drawn with replacement
    seen = set(itertools.chain(*samples))
    missing = length - len(seen)
    if missing >= max(len(of_ranks[0].batches[0].indices or ()) * len(of_ranks), 2) and max(seen) < length:
        yield Finding("samples-left-out", begin, f"{missing} of {length} samples are seen by no rank in epoch {number}")
