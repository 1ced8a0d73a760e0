"""The gradient of each step must be the average, over the ranks, of the sum over the micro-batches.

A probe is a linear function of a gradient. So the probes of what each rank computed by itself tell what the optimizer should
have got, and those of ``.grad`` before the step tell what it got. From the difference follows the bug.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from ddp.audit.detectors.finding import Finding
from ddp.audit.trace import Event, Probes, Step, Trace

CHAPTER = "ddp/README.md, chapter 4"
TOLERANCE = 5e-3  # gradients may have been sent in two bytes
Value = list[float]


def detect(trace: Trace) -> Iterator[Finding]:
    if trace.world_size < 2:
        return
    thrown_away = 0
    for steps in trace.steps():
        if finding := _of_step(trace, steps):
            thrown_away += LAST in finding.text  # once is right: a warm-up pass before the first step
            if LAST not in finding.text or thrown_away > 1:
                if finding.text.startswith(LOCAL) and _meet_again(trace):
                    finding.text, finding.is_hint = f"{LOCAL}. Later the weights are: this is local SGD", True
                yield finding
                return


def _meet_again(trace: Trace) -> bool:
    """Whether the ranks' weights differ after an optimizer step and are equal before the next one."""
    for before, after in itertools.pairwise(trace.steps()):
        left = [step.last("step")["parameters"] or {} for step in before]
        found = [step.last("before_step").get("parameters") or {} for step in after]
        different = [len(set(map(str, sums))) for sums in (left, found)]
        if left[0].keys() == found[0].keys() and different[0] > 1 == different[1]:
            return True
    return False


def _of_step(trace: Trace, steps: Sequence[Step]) -> Finding | None:
    passes = [step.all("backward") for step in steps]
    counts = {len(own) for own in passes}
    if len(counts) > 1 or counts == {0} or any("computed" not in one for own in passes for one in own):
        return None
    orders = [[event["kind"] for event in step.all("backward", "clip")] for step in steps]
    if changes_weights(steps[0]) or any(order != sorted(order) for order in orders):
        return None  # clipping between two passes is told by clipping.py
    if any(step.last("step").get("sharded") or "gradients" not in step.last("before_step") for step in steps):
        return None
    shared = [n for n in steps[0].own if all(n in step.own for step in steps)]
    numbers = [n for n in shared if all(n in step.last("before_step")["gradients"] for step in steps)]
    numbers = [n for n in numbers if any(n in one["computed"] for own in passes for one in own)]
    explanations = {n: _explain(n, steps, passes) for n in numbers}
    known = [text for text in explanations.values() if text]
    if not known:
        return None
    text = max(set(known), key=known.count)
    of_terms = [loss["weight"] * loss["terms"] / _scale(step) for step in steps for loss in step.all("loss")]
    # The script may divide the loss and not the gradients, or the other way round: together they are right.
    if text in (SUM, TWICE) and math.isclose(sum(of_terms) / len(steps) * factor_of(steps), 1, rel_tol=TOLERANCE):
        return None
    number = next(n for n in numbers if explanations[n] == text)
    return _finding(text, trace, steps[0], f"{trace.names.get(number, number)} and {len(known) - 1} more")


def changes_weights(step: Step) -> bool:
    """Whether the script itself changes the weights between two passes, as SAM does."""
    weights = {known for one in step.all("backward") for known in one.get("weights", {}).items()}
    return len(weights) > len(dict(weights))


def factor_of(steps: Sequence[Step]) -> float:
    """How many times the average of what the ranks computed the optimizer gets, if that is the same for all parameters; else 1."""
    factors = []
    for number in steps[0].own:
        computed = [_value(one.get("computed", {}), number) for step in steps for one in step.all("backward")]
        average, got = _scaled(_sum(computed), 1 / len(steps))[0] if computed else 0.0, unscaled(number, steps[0])
        if average and got and math.isfinite(average) and math.isfinite(got[0]):
            factors.append(got[0] / average)
    same = factors and max(factors) - min(factors) <= TOLERANCE * abs(factors[0])
    return factors[0] if same else 1.0


def _scale(step: Step) -> float:
    return float(step.last("scale").get("scale", 1.0))


def _explain(number: str, steps: Sequence[Step], passes: Sequence[Sequence[Event]]) -> str | None:
    """What is wrong with a parameter's gradient: None if nothing is, an empty text if it is not known."""
    ranks = range(len(steps))
    computed = [[_value(one["computed"], number) for one in own] for own in passes]
    totals = [_sum(own) for own in computed]
    average = _scaled(_sum(totals), 1 / len(steps))
    left = [_value(own[0]["before"], number) for own in passes]
    got = [unscaled(number, step) for step in steps]
    size = max(_norm(one["computed"], number) for own in passes for one in own) * len(passes[0])
    if any(value is None for value in got) or not size or not all(map(math.isfinite, (size, *average))):
        return None
    final = [value for value in got if value is not None]

    def equal(one: Value, other: Value) -> bool:
        return all(abs(a - b) <= TOLERANCE * size for a, b in zip(one, other, strict=True))

    def all_are(*values: Value) -> bool:
        return all(equal(final[r], values[r % len(values)]) for r in ranks)

    if all_are(average):
        return None
    if all_are(*(_sum([totals[r], left[r]]) for r in ranks)) and not equal(totals[0], totals[-1]):
        return LOCAL
    if all_are(*totals):
        return LOCAL
    if all_are(_scaled(average, len(steps))):
        return SUM
    if all_are(_scaled(average, 1 / len(steps))):
        return TWICE
    if len(passes[0]) > 1:
        last = _scaled(_sum([own[-1] for own in computed]), 1 / len(steps))
        if all_are(last):
            return LAST
        if not any(equal(final[r], final[0]) for r in ranks[1:]):
            return PARTLY
    return "" if all(equal(value, final[0]) for value in final) else DIFFERENT


LOCAL = "each rank steps with its own gradients: nothing was averaged"
SUM = "the gradients are summed over the ranks and not averaged"
TWICE = "the gradients are divided by the number of ranks twice"
LAST = "the gradients of all micro-batches but the last are thrown away"
PARTLY = "some of the micro-batches' gradients are averaged and others are not, so the ranks step with different ones"
DIFFERENT = "the ranks step with different gradients"


def _finding(text: str, trace: Trace, first: Step, which: str) -> Finding:
    """The finding, at the line that is to blame."""
    flags, forwards = first.all("flag", "forward", "backward"), first.all("forward")
    causes = (  # of gradients that are not averaged: the events that tell, what they tell, and the cure
        (
            [event for rank in trace.ranks for event in rank.all("around")],
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
            [event for event in first.all("collective") if event["in_backward"] and event["parameter"] is not None],
            "a hook sends the parameter and not its gradient",
            "Send parameter.grad: the argument of register_post_accumulate_grad_hook is the parameter",
        ),
    )
    for events, cause, cure in causes:
        if events and text in (LOCAL, PARTLY):
            return Finding(f"{cause}, so {text}", cure, events[0], CHAPTER, diverges=True)
    step = first.last("before_step")
    cure, event = {
        LOCAL: ("Wrap the model by DDP, or all-reduce and divide each gradient after backward", first.last("backward")),
        PARTLY: ("Average all micro-batches' gradients, or the sum of them", first.last("backward")),
        LAST: ("Move zero_grad behind the optimizer step", first.last("zero_grad") or step),
        SUM: ("Divide by the number of ranks", first.last("collective") or step),
        TWICE: ("DDP averages: do not divide again", step),
        DIFFERENT: ("Average the gradients on all ranks, in the same order", step),
    }[text]
    return Finding(f"{text}: {which}", cure, event, CHAPTER, diverges=text in (LOCAL, PARTLY, DIFFERENT))


def unscaled(number: str, step: Step) -> Value | None:
    """``.grad`` before the optimizer step, as it was before it was unscaled and clipped; None if that cannot be told."""
    factor = 1.0
    scale = step.last("scale").get("scale", 1.0) if step.all("unscale") else 1.0
    for clip in step.all("clip"):
        if clip["norm"] is None or not math.isfinite(clip["norm"]):
            return None
        factor *= min(1.0, clip["limit"] / (clip["norm"] + 1e-6))
    value = _value(step.last("before_step").get("gradients", {}), number)
    return _scaled(value, scale / factor) if factor else None


def _value(probes: Probes, number: str) -> Value:
    return probes[number][:-1] if number in probes else [0.0, 0.0]


def _norm(probes: Probes, number: str) -> float:
    return probes[number][-1] if number in probes else 0.0


def _sum(values: Sequence[Value]) -> Value:
    return [sum(parts) for parts in zip(*values, strict=True)]


def _scaled(value: Value, factor: float) -> Value:
    return [factor * part for part in value]
