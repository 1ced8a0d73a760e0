"""An optimizer must own the parameters that are trained, and its steps must change them."""

from __future__ import annotations

from collections.abc import Iterator

from ddp.audit.detectors.finding import Finding
from ddp.audit.trace import RankTrace, Step, Trace

CHAPTER = "ddp/README.md, chapter 4"


def detect(trace: Trace) -> Iterator[Finding]:
    for rank in trace.ranks[:1]:
        yield from _of_rank(rank, trace)
    yield from _owned_by_none(trace)


def _of_rank(rank: RankTrace, trace: Trace) -> Iterator[Finding]:
    closed = [step for step in rank.steps if not step.has_closure]
    looked_at = [step for step in closed if step.last("before_step").get("parameters") is not None]
    for line in dict.fromkeys(step.last("before_step")["where"] for step in looked_at):
        steps = [step for step in looked_at if step.last("before_step")["where"] == line]
        missing = [set(step.last("before_step")["without_gradient"]) for step in steps]
        always = set.intersection(*missing)
        own = steps[0].last("before_step")["own"]
        trained = any(step.all("backward") for step in steps)
        events = [event for event in steps[0].events if event["kind"] in ("backward", "zero_grad")]
        if len(always) == len(own) and events and events[-1]["kind"] == "zero_grad" and trained:
            yield Finding(
                "zero_grad comes between the backward pass and the optimizer step, which has no gradients then",
                "Call it after the step, or before the backward pass",
                events[-1],
                CHAPTER,
            )
        elif always and trained and len(always) == len(own):
            yield Finding(
                f"none of the optimizer's {len(own)} parameters ever has a gradient: it owns others than the model that is trained",
                "Build the optimizer after the model is wrapped, sharded, moved and converted, from that model's parameters()",
                steps[0].last("before_step"),
                CHAPTER,
            )
        elif rest := next((step for step in steps[1:] if _starts_with_a_rest(step)), None):
            yield Finding(
                "the gradients of the step before are still in .grad, and are added to this step's",
                "Call zero_grad once per optimizer step, after it",
                rest.last("before_step"),
                CHAPTER,
            )
        elif len(steps) > 1 and all(map(_is_unchanged, steps)):
            yield Finding(
                "no optimizer step changes any weight, though the learning rate is not 0",
                "Look for a zero_grad between backward and step, or an optimizer of other parameters",
                steps[0].last("before_step"),
                CHAPTER,
            )


def _starts_with_a_rest(step: Step) -> bool:
    """Whether the optimizer's gradients are there before the first backward pass that computes them: all that are not zero."""
    passes = [one for one in step.all("backward") if one.get("computed", {}).keys() & set(step.own)]
    first = (passes or step.all("backward") or [{}])[0].get("before") or {}  # of shards, the gradients are others
    used = [number for number in step.own if any(step.last("before_step").get("gradients", {}).get(number, ()))]
    return bool(used) and all(any(first.get(number, ())) for number in used)


def _owned_by_none(trace: Trace) -> Iterator[Finding]:
    """Parameters whose gradients DDP averages in each step, and that no rank's optimizer has."""
    steps = [step for rank in trace.ranks for step in rank.steps]
    if any(step.last("step").get("sharded") for step in steps) or not any(step.all("forward") for step in steps):
        return
    own = {number for step in steps for number in step.own}
    passes = [one.get("computed", {}) for step in steps for one in step.all("backward")]
    lost = sorted({number for one in passes for number, probe in one.items() if any(probe)} - own, key=int)
    if lost:
        yield Finding(
            f"{len(lost)} parameters have gradients and are in no optimizer: {trace.names.get(lost[0], lost[0])}",
            "Give the optimizer all parameters, or set requires_grad to False before the model is wrapped",
            steps[0].last("before_step"),
            CHAPTER,
        )


def _is_unchanged(step: Step) -> bool:
    before = step.last("before_step")
    return any(before["rates"]) and before["parameters"] == step.last("step")["parameters"]
