"""In one optimizer step all terms of the loss must have the same weight, and the weights must sum to 1.

A weight is what a loss function's terms are multiplied with on the way to the gradient: the mean, divisions by the number of
micro-batches, whatever the script does. DDP's average over the ranks comes on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ddp.audit.detectors.averages import factor_of
from ddp.audit.detectors.finding import Finding
from ddp.audit.trace import Event, Step, Trace

CHAPTER = "ddp/README.md, chapter 5"
TOLERANCE = 1e-3


def detect(trace: Trace) -> Iterator[Finding]:
    for steps in trace.steps():
        losses = [_losses(step) for step in steps]
        for call in dict.fromkeys(loss["call"] for own in losses for loss in own):
            found = _of_call(trace.world_size, steps, [[one for one in own if one["call"] == call] for own in losses])
            if found is not None:
                yield found
                return


def _losses(step: Step) -> list[Event]:
    """The losses of a step, each with the scaler's scale, and with whether it is of a batch that was gathered from all ranks."""
    scale, gathered, losses = step.last("scale").get("scale", 1.0), False, list[Event]()
    for event in step.events:
        if event["kind"] == "zero_grad":
            losses.clear()  # their gradients are gone
        gathered |= event["kind"] == "put_back"
        if event["kind"] == "loss" and event["terms"]:
            losses.append(event | {"scale": scale, "gathered": gathered})
    return losses


def _of_call(ranks: int, steps: Sequence[Step], losses: Sequence[Sequence[Event]]) -> Finding | None:
    """Of the losses that one call in the script computed, by rank."""
    weights = [(rank, loss, abs(loss["weight"]) / loss["scale"]) for rank, own in enumerate(losses) for loss in own]
    finite = [one for one in weights if math.isfinite(one[2]) and one[2] > 0]
    if len(finite) < len(weights) or not finite:
        return None
    (low_rank, low, least), (rank, high, most) = min(finite, key=lambda w: w[2]), max(finite, key=lambda w: w[2])
    if most > (1 + TOLERANCE) * least and low["terms"] != high["terms"]:
        return Finding(
            f"a mean of means: a term of the loss weighs {most:.3g} in a micro-batch of {high['terms']} terms on rank {rank}, and "
            f"{least:.3g} in one of {low['terms']} on rank {low_rank}",
            "Divide the sum of the losses by the number of terms in the global batch, over all ranks and micro-batches",
            high,
            CHAPTER,
        )
    passes = max(map(len, losses))
    total = sum(weight * loss["terms"] for _, loss, weight in finite) / ranks
    if high["gathered"]:  # each rank's loss is that of the global batch, and leads to its own part of the gradient
        if math.isclose(total, 1, rel_tol=TOLERANCE):
            return Finding(
                f"the gradient is too small by a factor of {ranks}: each rank computes the loss of the gathered batch, and gets the "
                "gradient of its own part; the parts should be added, and DDP averages them",
                "Multiply the loss by the number of ranks",
                high,
                CHAPTER,
            )
        return None
    total *= factor_of(steps)
    too_large = total > 1.5 and math.isclose(total, round(total), rel_tol=TOLERANCE) and passes % round(total) == 0
    if 1 < passes <= len(steps[0].all("backward")) and too_large:
        return Finding(
            f"the loss is not divided by the {passes} micro-batches of a step: the weights of all terms sum to {total:.3g} and not to 1",
            f"Divide each micro-batch's mean loss by {passes}",
            high,
            CHAPTER,
        )
    if ranks > 1 and math.isclose(total, 1 / ranks, rel_tol=TOLERANCE):
        return Finding(
            f"the weights of all terms sum to {total:.3g}, which is 1 / the number of ranks",
            "If the loss is divided by the number of ranks, leave that out: DDP divides the gradients already",
            high,
            CHAPTER,
            is_hint=True,
        )
    for factor, text in ((ranks * passes, "ranks x micro-batches"), (ranks, "ranks")):
        if factor > 1 and math.isclose(total, factor, rel_tol=TOLERANCE):
            return Finding(
                f"the weights of all terms sum to {total:.3g} and not to 1: the loss is multiplied by the number of {text}",
                "DDP divides by the number of ranks: weigh each term by 1 / the terms of the global batch x ranks, no more",
                high,
                CHAPTER,
            )
    return None
