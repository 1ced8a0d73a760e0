"""The gradient of each step must be the average, over the ranks, of the sum over the micro-batches.

A probe is a linear function of a gradient. So the probes of what each rank computed by itself tell what the optimizer should
have got, and those of ``.grad`` before the step tell what it got. From the difference follows the bug.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
from numpy.typing import ArrayLike

from ddp.audit.detectors.finding import Finding, Findings
from ddp.audit.detectors.replicas import differing
from ddp.audit.trace import Step, Trace

CHAPTER = "ddp/README.md, chapter 4"
TOLERANCE = 5e-3  # gradients may have been sent in two bytes
NO_GRADIENT = [0.0, 0.0, 0.0]  # the probe of a parameter that a backward pass does not reach

# The kinds of findings.
LOCAL = "each rank steps with its own gradients: nothing was averaged"
SUM = "the gradients are summed over the ranks and not averaged"
TWICE = "the gradients are divided by the number of ranks twice"
LAST = "the gradients of all micro-batches but the last are thrown away"
PARTLY = "some of the micro-batches' gradients are averaged and others are not, so the ranks step with different ones"
DIFFERENT = "the ranks step with different gradients"
# The cure of each, and the kind of the event that is to blame.
CURES = {
    LOCAL: ("Wrap the model by DDP, or all-reduce and divide each gradient after backward", "backward"),
    SUM: ("Divide by the number of ranks", "collective"),
    TWICE: ("DDP averages: do not divide again", "before_step"),
    LAST: ("Move zero_grad behind the optimizer step", "zero_grad"),
    PARTLY: ("Average all micro-batches' gradients, or the sum of them", "backward"),
    DIFFERENT: ("Average the gradients on all ranks, in the same order", "before_step"),
}


def detect(trace: Trace) -> Findings:
    findings = (finding for steps in trace.steps() for finding in _of_step(trace, steps))
    finding = next(findings, None)
    if finding and LAST in finding.text:
        finding = next(findings, None)  # once is right: a warm-up pass before the first step
    if finding:
        if finding.text.startswith(LOCAL) and _meet_again(trace):
            finding.text, finding.is_hint = f"{LOCAL}. Later the weights are: this is local SGD", True
        yield finding


def _meet_again(trace: Trace) -> bool:
    """Whether the ranks' weights differ after an optimizer step and are equal before the next one."""
    return any(
        "parameters" in after[0].before
        and before[0].own == after[0].own
        and differing(before, "step")
        and not differing(after, "before_step")
        for before, after in itertools.pairwise(trace.steps())
    )


def _of_step(trace: Trace, steps: list[Step]) -> Findings:
    orders = [[event["kind"] for event in step.all("backward", "clip")] for step in steps]
    if any(order != sorted(order) for order in orders) or changes_weights(steps[0]):
        return  # clipping between two passes is told by clipping.py
    passes = {order.count("backward") for order in orders}
    if len(passes) > 1 or 0 in passes or any(step.last("step")["sharded"] for step in steps):
        return
    shared = set.intersection(*(step.before.get("gradients", {}).keys() & set(step.own) for step in steps))
    wrong = {number: text for number in steps[0].own if number in shared and (text := _explain(number, steps))}
    for text, _ in Counter(wrong.values()).most_common(1):
        of_terms = sum(loss["weight"] * loss["terms"] / step.scale for step in steps for loss in step.all("loss"))
        # The script may divide the loss and not the gradients, or the other way round: together they are right.
        if text in (SUM, TWICE) and math.isclose(of_terms / len(steps) * factor_of(steps), 1, rel_tol=TOLERANCE):
            return
        number = next(number for number in wrong if wrong[number] == text)
        yield _finding(text, trace, steps[0], f"{trace.names.get(number, number)} and {len(wrong) - 1} more")


def changes_weights(step: Step) -> bool:
    """Whether the script itself changes the weights between two passes, as SAM does."""
    weights = {known for one in step.all("backward") for known in one.get("weights", {}).items()}
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
    """Describe the error in a parameter's gradient; None if nothing is, or if that cannot be told."""
    ranks = len(steps)
    got = [value for step in steps if (value := unscaled(number, step))]
    probes = np.array([[one.get(number, NO_GRADIENT) for one in step.computed] for step in steps])
    computed, norms = probes[..., :-1], probes[..., -1]  # for each rank and pass
    if len(got) < ranks or not np.isfinite(probes).all() or not norms.any():
        return None
    left = np.array([step.all("backward")[0]["before"].get(number, NO_GRADIENT)[:-1] for step in steps])
    totals = computed.sum(axis=1)
    average = totals.mean(axis=0)
    passes = computed.shape[1]

    def equal(one: ArrayLike, other: ArrayLike) -> bool:
        return np.allclose(one, other, rtol=0.0, atol=TOLERANCE * passes * norms.max())

    if equal(got, average):
        return None
    if equal(got, totals) or (equal(got, totals + left) and not equal(totals[0], totals[-1])):
        return LOCAL
    if equal(got, average * ranks):
        return SUM
    if equal(got, average / ranks):
        return TWICE
    if equal(got, computed[:, -1].mean(axis=0)):
        return LAST
    if passes > 1 and not any(equal(got[0], other) for other in got[1:]):
        return PARTLY
    return None if equal(got, got[0]) else DIFFERENT


def _finding(text: str, trace: Trace, first: Step, which: str) -> Finding:
    """The finding, at the line that is to blame."""
    flags, forwards = first.all("flag", "forward", "backward"), first.all("forward")
    causes = (  # of gradients that are not averaged: the events that tell, what they tell, and the cure
        (
            trace.ranks[0].all("around"),
            "the forward pass goes around the DDP wrapper",
            "Call the wrapper, not its .module",
        ),
        (
            [b for a, b in itertools.pairwise(flags) if a["kind"] == "forward" and b["kind"] == "flag"],
            "require_backward_grad_sync is set after the forward pass, which has read it already",
            "Set it before the forward pass, or put forward and backward under no_sync()",
        ),
        (
            [] if any(event["synchronizes"] for event in forwards) else forwards[-1:],
            "no forward pass of this step has require_backward_grad_sync on",
            "Set it, or leave no_sync(), for the last micro-batch's forward and backward",
        ),
        (
            [event for event in forwards if event["lost"]],
            "parameters are other objects than when DDP was built, or were frozen or of another dtype then, and have no hooks",
            "Convert, move and unfreeze the model before it is wrapped",
        ),
        (
            [event for event in first.all("collective") if event["sends_parameter"]],
            "a hook sends the parameter and not its gradient",
            "Send parameter.grad: the argument of register_post_accumulate_grad_hook is the parameter",
        ),
    )
    for events, cause, cure in causes:
        if events and text in (LOCAL, PARTLY):
            return Finding(f"{cause}, so {text}", cure, events[0], diverges=True)
    cure, kind = CURES[text]
    blamed = first.last(kind) or first.before
    return Finding(f"{text}: {which}", cure, blamed, diverges=text not in (SUM, TWICE, LAST))


def unscaled(number: str, step: Step) -> list[float] | None:
    """``.grad`` before the optimizer step, as it was before it was unscaled and clipped; None if that cannot be told."""
    factor = 1.0
    for clip in step.all("clip"):
        if clip["norm"] is None or not math.isfinite(clip["norm"]):
            return None
        factor *= min(1.0, clip["limit"] / (clip["norm"] + 1e-6))
    scale = step.scale if step.all("unscale") else 1.0
    probe = step.before.get("gradients", {}).get(number, NO_GRADIENT)
    return [part * scale / factor for part in probe[:-1]] if factor else None
