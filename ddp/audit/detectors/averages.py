"""The gradient of each step must be the average, over the ranks, of the sum over the micro-batches.

A probe is a linear function of a gradient. So the probes of what each rank computed by itself tell what the optimizer should
have got, and those of ``.grad`` before the step tell what it got. From the difference follows the bug.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ddp.audit.detectors.replicas import differing, own_of_ranks
from ddp.audit.finding import KINDS, Finding, Findings
from ddp.audit.trace import Step, Trace
from ddp.audit.watch.event_types import (
    Around,
    Backward,
    Batch,
    BeforeStep,
    Clip,
    Collective,
    Event,
    Flag,
    Forward,
    Loss,
    Stepped,
    Unscale,
    ZeroGrad,
)

TOLERANCE = 5e-3  # gradients may have been sent in two bytes
NO_GRADIENT = [0.0, 0.0, 0.0]  # the probe of a parameter that a backward pass does not reach

LOCAL, PARTLY, DIFFERENT = "not-averaged", "partly-averaged", "different-gradients"
SUM, TWICE, LAST = "summed-not-averaged", "divided-twice", "last-micro-batch-only"
# The kind of the event that is to blame.
BLAMED: dict[str, type[Event]] = {
    LOCAL: Backward,
    SUM: Collective,
    TWICE: BeforeStep,
    LAST: ZeroGrad,
    PARTLY: Backward,
    DIFFERENT: BeforeStep,
}


def detect(trace: Trace) -> Findings:
    own = own_of_ranks(trace)
    findings = (finding for steps in trace.steps() for finding in _of_step(trace, steps, own))
    finding = next(findings, None)
    if finding and finding.name == LAST:
        finding = next(findings, None)  # once is right: a warm-up pass before the first step
    if finding and finding.name == LOCAL and _meet_again(trace):
        yield Finding("local-sgd", finding.event, diverges=True)
    elif finding:
        yield finding
    elif own:
        which = trace.names.get(min(own), min(own))
        text = f"{which} and {len(own) - 1} more are other parameters on each rank: as of model parallelism, or nothing averages them"
        yield Finding(LOCAL, trace.ranks[0].steps[0].before, text, is_hint=True)


def _meet_again(trace: Trace) -> bool:
    """Whether the ranks' weights differ after an optimizer step and are equal before the next one."""
    return any(
        after[0].before.parameters is not None
        and before[0].own == after[0].own
        and differing(before, Stepped)
        and not differing(after, BeforeStep)
        for before, after in itertools.pairwise(trace.steps())
    )


def _of_step(trace: Trace, steps: list[Step], own: set[str]) -> Findings:
    if why_not(steps):
        return
    shared = _shared(steps) - own
    names = {number: _explain(number, steps) for number in steps[0].own if number in shared}
    wrong = {number: name for number, name in names.items() if name}
    for name, _ in Counter(wrong.values()).most_common(1):
        of_terms = sum(loss.weight * loss.terms / step.scale for step in steps for loss in step.losses)
        # The script may divide the loss and not the gradients, or the other way round: together they are right.
        if name in (SUM, TWICE) and math.isclose(of_terms / len(steps) * factor_of(steps), 1, rel_tol=TOLERANCE):
            return
        number = next(number for number in wrong if wrong[number] == name)
        yield _finding(name, trace, steps[0], f"{trace.names.get(number, number)} and {len(wrong) - 1} more")
    # Where ``.grad`` is not what the last passes gave, the script may keep sums elsewhere, as in ``main_grad``.
    if not wrong and "" in names.values() and _loses_a_batch(steps[0]):
        yield _finding(LAST, trace, steps[0], f"{len(steps[0].passes)} of {len(steps[0].all(Backward))} are left")


def _loses_a_batch(step: Step) -> bool:
    """Whether gradients are cleared that came from another batch than those that are left. An attack's come from the same."""
    kept = step.events.index(step.passes[0])
    cleared = next((at for at, event in enumerate(step.events[:kept]) if isinstance(event, Backward)), kept)
    if step.all(Batch):
        return any(isinstance(event, Batch) for event in step.events[cleared:kept])
    targets = [event.probes[1] for event in step.events[:kept] if isinstance(event, Loss)]
    return cleared < kept and any(target != targets[0] for target in targets)


def _shared(steps: list[Step]) -> set[str]:
    """The parameters of all ranks' optimizers whose gradients were looked at."""
    return set.intersection(*(step.before.gradients.keys() & set(step.own) for step in steps))


def why_not(steps: list[Step]) -> str:
    """Why a step cannot be judged; empty if it can."""
    orders = [[isinstance(event, Clip) for event in step.all(Backward, Clip)] for step in steps]
    passes = {len(step.passes) for step in steps}
    if any(order != sorted(order) for order in orders):
        return "gradients are clipped between two backward passes"  # clipping.py tells of it
    if changes_weights(steps[0]):
        return "weights are changed between two backward passes"
    if len(passes) > 1 or 0 in passes:
        return f"the ranks have {sorted(passes)} backward passes"
    if any(step.after.sharded for step in steps):
        return "the parameters are sharded"
    return "" if _shared(steps) else "the ranks' optimizers share no parameter with a gradient"


def changes_weights(step: Step) -> bool:
    """Whether the script itself changes the weights between two passes, as SAM does."""
    weights = {known for one in step.all(Backward) for known in one.weights.items()}
    return len(weights) > len(dict(weights))


def factor_of(steps: list[Step]) -> float:
    """How many times the average of what the ranks computed the optimizer gets, if that is the same for all parameters; else 1."""
    factors = []
    for number in steps[0].own:
        computed = [probes.get(number, NO_GRADIENT)[0] for step in steps for probes in step.computed]
        average, got = sum(computed) / len(steps), unscaled(number, steps[0])
        if average and got and math.isfinite(got[0] / average):
            factors.append(got[0] / average)
    return factors[0] if factors and np.allclose(factors, factors[0], rtol=TOLERANCE) else 1.0


def _explain(number: str, steps: list[Step]) -> str | None:
    """The name of the error in a parameter's gradient; empty if there is none, None if that cannot be told."""
    ranks = len(steps)
    got = [value for step in steps if (value := unscaled(number, step))]
    probes = np.array([[one.get(number, NO_GRADIENT) for one in step.computed] for step in steps])
    computed, norms = probes[..., :-1], probes[..., -1]  # for each rank and pass
    if len(got) < ranks or not np.isfinite(probes).all() or not norms.any():
        return None
    left = np.array([step.passes[0].before.get(number, NO_GRADIENT)[:-1] for step in steps])
    totals = computed.sum(axis=1)
    average = totals.mean(axis=0)
    passes = computed.shape[1]

    def equal(one: ArrayLike, other: ArrayLike) -> bool:
        return np.allclose(one, other, rtol=0.0, atol=TOLERANCE * passes * norms.max())

    if equal(got, average):
        return ""
    if equal(got, totals) or (equal(got, totals + left) and not equal(totals[0], totals[-1])):
        return LOCAL
    if equal(got, average * ranks):
        return SUM
    if equal(got, average / ranks):
        return TWICE
    if passes > 1 and not any(equal(got[0], other) for other in got[1:]):
        return PARTLY
    return None if equal(got, got[0]) else DIFFERENT


def _finding(name: str, trace: Trace, first: Step, which: str) -> Finding:
    """The finding, at the line that is to blame."""
    flags, forwards = first.all(Flag, Forward, Backward), first.all(Forward)
    causes: dict[str, Sequence[Event]] = {  # of gradients that are not averaged: the events that tell
        "around-the-wrapper": trace.ranks[0].all(Around),
        "flag-after-forward": [
            b for a, b in itertools.pairwise(flags) if isinstance(a, Forward) and isinstance(b, Flag)
        ],
        "flag-never-on": [] if any(event.synchronizes for event in forwards) else forwards[-1:],
        "hooks-lost": [event for event in forwards if event.lost],
        "averages-parameters": [event for event in first.all(Collective) if event.sends_parameter],
    }
    for cause, events in causes.items():
        if events and name in (LOCAL, PARTLY):
            return Finding(cause, events[0], f"{KINDS[cause].what}, so {KINDS[name].what}", diverges=True)
    event = first.last(BLAMED[name]) or first.before
    return Finding(name, event, f"{KINDS[name].what}: {which}", diverges=name not in (SUM, TWICE, LAST))


def unscaled(number: str, step: Step) -> list[float] | None:
    """``.grad`` before the optimizer step, as it was before it was unscaled and clipped; None if that cannot be told."""
    factor = 1.0
    for clip in step.all(Clip):
        if clip.norm is None or not math.isfinite(clip.norm):
            return None
        factor *= min(1.0, (clip.limit or 0.0) / (clip.norm + 1e-6))
    scale = step.scale if step.all(Unscale) else 1.0
    probe = step.before.gradients.get(number, NO_GRADIENT)
    return [part * scale / factor for part in probe[:-1]] if factor else None
