"""An optimizer must own the parameters that are trained, and its steps must change them."""

from __future__ import annotations

from ddp.audit.finding import Finding, Findings
from ddp.audit.trace import Step, Trace
from ddp.audit.watch.event_types import Backward, Forward, ZeroGrad


def detect(trace: Trace) -> Findings:
    by_optimizer: dict[tuple[str, ...], list[Step]] = {}
    for step in trace.ranks[0].steps:
        if step.before.parameters is not None and not step.has_closure:
            by_optimizer.setdefault((step.before.where, *step.own), []).append(step)
    for steps in by_optimizer.values():
        yield from _of_optimizer(steps)
    yield from _owned_by_none(trace)


def _of_optimizer(steps: list[Step]) -> Findings:
    first = steps[0].before
    always_without = set.intersection(*(set(step.before.without_gradient) for step in steps))
    none_has = len(always_without) == len(first.own) > 0 and any(step.computed for step in steps)
    last = steps[0].last(Backward, ZeroGrad)
    if none_has and isinstance(last, ZeroGrad):
        yield Finding("zero-grad-before-step", last)
    elif none_has:
        yield Finding(
            "optimizer-of-other-parameters",
            first,
            f"none of the optimizer's {len(first.own)} parameters ever has a gradient: it owns others than the model that is trained",
        )
    elif rest := [step.before for step in steps[1:] if _starts_with_a_rest(step)]:
        yield Finding("gradients-not-cleared", rest[0])
    elif len(steps) > 1 and all(
        any(step.before.rates) and step.before.parameters == step.after.parameters for step in steps
    ):
        yield Finding("weights-never-change", first)


def _starts_with_a_rest(step: Step) -> bool:
    """Whether the optimizer's gradients are there before the first backward pass that computes them: all that are not zero."""
    used = [number for number in step.own if any(step.before.gradients.get(number, ()))]
    return bool(step.passes and used) and all(any(step.passes[0].before.get(number, ())) for number in used)


def _owned_by_none(trace: Trace) -> Findings:
    """Parameters whose gradients DDP averages in each step, and that no rank's optimizer has."""
    steps = [step for rank in trace.ranks for step in rank.steps]
    if any(step.after.sharded for step in steps) or not any(step.all(Forward) for step in steps):
        return
    own = {number for step in steps for number in step.own}
    lost = sorted({n for step in steps for one in step.computed for n in one if any(one[n])} - own, key=int)
    if lost:
        yield Finding(
            "parameters-in-no-optimizer",
            steps[0].before,
            f"{len(lost)} parameters have gradients and are in no optimizer: {trace.names.get(lost[0], lost[0])}",
        )
