"""An evaluation counts each sample once, over all ranks, with the model in evaluation mode."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ddp.audit.detectors.finding import Finding, Findings
from ddp.audit.trace import Epoch, Trace, epochs, together
from ddp.audit.watch.event_types import Backward, Batch, Collective, Evaluation, Event, Forward, LoaderEnds


def detect(trace: Trace) -> Findings:
    first = trace.ranks[0]
    training = {epoch.begin.iterator for epoch in epochs(first) if epoch.trains}
    latest: Event | None = None
    for event in first.all(Evaluation, Batch, LoaderEnds):
        if not isinstance(event, Evaluation):
            latest = event
        elif isinstance(latest, Batch) and latest.iterator in training:
            continue  # a part of a training step, such as a teacher's pass
        elif event.training and event.random:
            yield Finding(
                "evaluates-in-training-mode",
                event,
                f"a forward pass without gradients runs in training mode, though the model has {event.random}",
                0,
            )
    for forward, backward in itertools.pairwise(first.all(Forward, Backward)):
        if isinstance(forward, Forward) and not forward.training and forward.layer and isinstance(backward, Backward):
            yield Finding(
                "trains-in-evaluation-mode",
                forward,
                f"the model trains in evaluation mode, in which {forward.layer} does nothing, or does not learn",
                0,
            )
            break
    for events in together(trace.ranks, Evaluation):
        if any(event.buffers != events[0].buffers for event in events):
            yield Finding("buffers-differ", events[0])
            break
    for of_ranks in trace.epochs(train=False):
        yield from _samples(of_ranks)


def _samples(of_ranks: Sequence[Epoch]) -> Findings:
    numbered = set(itertools.chain(*(epoch.numbered() for epoch in of_ranks)))
    if len(numbered) > len(dict(numbered)):
        return  # the ranks have data sets of their own, whose numbers tell nothing
    first, samples = of_ranks[0], [epoch.samples for epoch in of_ranks]
    begin, part = first.begin, len(set(samples[0]))
    total, covered = sum(map(len, samples)), len(set(itertools.chain(*samples)))
    are_same = min(samples) == max(samples)
    sent = {event.name for event in first.after if isinstance(event, Collective)} - {"barrier", "monitored_barrier"}
    is_counted = total > covered and sent & {"all_reduce", "reduce"}  # what is gathered may be cut to the right length
    if is_counted and not are_same and all(epoch.samples and epoch.ended for epoch in of_ranks):
        yield Finding(
            "evaluation-counts-twice",
            begin,
            f"the evaluation counts {total} samples, of which {covered} are different: {begin.sampler} gives some to several ranks",
        )
    if not part or begin.length in (0, part) or not first.ended:
        return
    if are_same and sent:
        yield Finding(
            "evaluates-the-same-part",
            begin,
            f"all ranks evaluate the same {part} of {begin.length} samples, and the others are left out",
        )
    if covered > part and not sent:
        yield Finding(
            "evaluation-not-summed",
            begin,
            f"rank 0 evaluates {part} of {begin.length} samples, and nothing is summed over the ranks afterwards",
            0,
        )
