"""An evaluation counts each sample once, over all ranks, in evaluation mode; its samples are not trained on, and its weights stay."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ddp.audit.detectors.replicas import differing
from ddp.audit.finding import Finding, Findings
from ddp.audit.trace import Epoch, Trace, together
from ddp.audit.watch.event_types import (
    Backward,
    Batch,
    BeforeStep,
    Checksums,
    Collective,
    Evaluation,
    Event,
    Forward,
    Load,
    LoaderBegins,
    LoaderEnds,
    Stepped,
)

LEAST_COMMON = 5  # rows: a few may be equal by chance, or are looked at as a preview


def detect(trace: Trace) -> Findings:
    first = trace.ranks[0]
    latest: Event | None = None
    for event in first.all(Evaluation, Batch, LoaderEnds):
        if not isinstance(event, Evaluation):
            latest = event
        elif isinstance(latest, Batch) and latest.iterator in first.training_iterators:
            continue  # a part of a training step, such as a teacher's pass
        # (A pass before the first batch, such as one that counts FLOPs, evaluates nothing.)
        elif event.training and event.random and (latest or not first.training_iterators):
            yield Finding(
                "evaluates-in-training-mode",
                event,
                f"a forward pass without gradients runs in training mode, though the model has {event.random}",
                0,
            )
    taken = {id(one) for step in first.steps for one in step.passes}  # and not those of an attack, which are cleared
    for forward, backward in itertools.pairwise(first.all(Forward, Backward)):
        if isinstance(forward, Forward) and not forward.training and forward.layer and id(backward) in taken:
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
    yield from _trained_on(trace)
    yield from _changed(trace)


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
    is_divided = not are_same and all(epoch.samples and epoch.is_whole for epoch in of_ranks)
    if is_counted and is_divided:
        yield Finding(
            "evaluation-counts-twice",
            begin,
            f"the evaluation counts {total} samples, of which {covered} are different: {begin.sampler} gives some to several ranks",
        )
    if sent and is_divided and {epoch.begin.length for epoch in of_ranks} == {begin.length} and covered < begin.length:
        text = f"{begin.length - covered} of {begin.length} samples are left out of the evaluation"
        yield Finding("evaluation-leaves-out", begin, text)
    if not part or begin.length in (0, part) or not first.is_whole:
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


def _trained_on(trace: Trace) -> Findings:
    """Samples of the set on which training has gone on before. Rows are compared, since each data set has numbers of its own."""
    trained = dict[int, dict[int, int]]()  # the rows of each data set, and the first rank that trains on each
    for rank in reversed(trace.ranks):
        for epoch in rank.training:
            trained.setdefault(epoch.begin.dataset, {}).update(dict.fromkeys(epoch.rows, rank.rank))
    latest: int | None = None
    for epoch in trace.ranks[0].epochs:
        if epoch.trains:
            latest = epoch.begin.dataset
        elif latest is not None and epoch.begin.dataset not in trained:
            ranks = [trained[latest][row] for row in trained[latest].keys() & epoch.rows]
            common, of_all = len(ranks), len(set(epoch.rows))
            if 0 not in ranks and LEAST_COMMON <= common < of_all:  # all: it evaluates the training set
                text = f"{common} of {of_all} samples that rank 0 evaluates are trained on by other ranks, and none by itself"
                yield Finding("splits-differ", epoch.begin, text, 0)
            elif 2 * common > of_all:
                text = f"{common} of {of_all} samples of this evaluation are trained on, too"
                yield Finding("evaluates-what-is-trained-on", epoch.begin, text, 0)


def _changed(trace: Trace) -> Findings:
    """Weights that are others after each evaluation, and only after one."""
    if any(differing(steps, Stepped) for steps in trace.steps()):
        return  # ranks that go on alone, and are averaged from time to time
    first = trace.ranks[0]
    latest: dict[tuple[str, ...], Checksums] = {}
    evaluation: Event | None = None
    changed: list[BeforeStep] = []
    for event in first.events:
        if isinstance(event, LoaderBegins) and event.iterator not in first.training_iterators and event.evaluates:
            evaluation = event
        elif isinstance(event, Load):
            return
        elif isinstance(event, BeforeStep) and event.parameters is not None:
            before = latest.get(tuple(event.parameters), event.parameters)
            if (before != event.parameters) != (evaluation is not None and bool(latest)):
                return
            changed += [event] * (before != event.parameters)
        elif isinstance(event, Stepped) and event.parameters is not None:
            latest[tuple(event.parameters)], evaluation = event.parameters, None
    for event in changed[:1]:
        yield Finding("weights-change-in-evaluation", event, rank=0)
