"""An evaluation has all samples of a set that is not trained on, and leaves the weights as they were."""

from __future__ import annotations

import itertools

from ddp.audit.detectors.finding import Finding, Findings
from ddp.audit.trace import Trace, epochs
from ddp.audit.watch.event_types import BeforeStep, Checksums, Collective, Event, Load, LoaderBegins, Stepped


def detect(trace: Trace) -> Findings:
    yield from _left_out(trace)
    yield from _trained_on(trace)
    yield from _changed(trace)


def _left_out(trace: Trace) -> Findings:
    for of_ranks in trace.epochs(train=False):
        begin, samples = of_ranks[0].begin, [epoch.samples for epoch in of_ranks]
        is_whole = all(samples) and all(epoch.ended and epoch.begin.length == begin.length for epoch in of_ranks)
        missing = begin.length - len(set(itertools.chain(*samples)))
        is_reduced = any(isinstance(event, Collective) for event in of_ranks[0].after)
        if is_whole and is_reduced and missing > 0 and min(samples) < max(samples):
            text = f"{missing} of {begin.length} samples are left out of the evaluation"
            yield Finding("evaluation-leaves-out", begin, text)
            return


def _trained_on(trace: Trace) -> Findings:
    """Samples of the set on which training has gone on before. Rows are compared, since each data set has numbers of its own."""
    trained = dict[int, set[int]]()
    for rank in trace.ranks:
        for epoch in epochs(rank):
            if epoch.trains:
                trained.setdefault(epoch.begin.dataset, set()).update(epoch.rows)
    latest: int | None = None
    for epoch in epochs(trace.ranks[0]):
        rows = set(epoch.rows)
        if epoch.trains:
            latest = epoch.begin.dataset
        elif latest is not None and epoch.begin.dataset != latest and 2 * len(rows & trained[latest]) > len(rows):
            text = f"{len(rows & trained[latest])} of {len(rows)} samples of this evaluation are trained on, too"
            yield Finding("evaluates-what-is-trained-on", epoch.begin, text, 0)
            return


def _changed(trace: Trace) -> Findings:
    """Weights that are others after each evaluation, and only after one."""
    first = trace.ranks[0]
    training = {epoch.begin.iterator for epoch in epochs(first) if epoch.trains}
    latest: dict[tuple[str, ...], Checksums] = {}
    evaluation: Event | None = None
    changed: list[BeforeStep] = []
    for event in first.events:
        if isinstance(event, LoaderBegins) and event.iterator not in training and event.evaluates:
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
