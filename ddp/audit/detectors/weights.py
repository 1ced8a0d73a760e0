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
        calls = dict.fromkeys(loss["call"] for own in losses for loss in own)
        by_call = [[[loss for loss in own if loss["call"] == call] for own in losses] for call in calls]
        found = _of_step(trace.world_size, steps, by_call)
        if found is not None:
            yield found
            return


def _losses(step: Step) -> list[Event]:
    """The losses of a step, each with the weight of a term, and with whether it is of a batch that was gathered from all ranks."""
    scale, gathered, losses = step.last("scale").get("scale", 1.0), False, list[Event]()
    for event in step.events:
        if event["kind"] == "zero_grad":
            losses.clear()  # their gradients are gone
        gathered |= event["kind"] == "put_back"
        if event["kind"] == "loss" and event["terms"]:
            losses.append(event | {"weight": abs(event["weight"]) / scale, "gathered": gathered})
    return losses


def _of_step(ranks: int, steps: Sequence[Step], calls: Sequence[Sequence[Sequence[Event]]]) -> Finding | None:
    """:param calls: for each call in the script, the losses of each rank"""
    totals: list[tuple[float, Event]] = []  # of each call: the weights of all terms, averaged over the ranks
    passes = 1
    for of_call in calls:
        losses = [(rank, loss) for rank, own in enumerate(of_call) for loss in own]
        if not all(0 < loss["weight"] < math.inf for _, loss in losses):
            return None
        losses.sort(key=lambda one: one[1]["weight"])
        (low_rank, low), (rank, high) = losses[0], losses[-1]
        if high["weight"] > (1 + TOLERANCE) * low["weight"] and low["terms"] != high["terms"]:
            return Finding(
                f"a mean of means: a term of the loss weighs {high['weight']:.3g} in a micro-batch of {high['terms']} terms on rank "
                f"{rank}, and {low['weight']:.3g} in one of {low['terms']} on rank {low_rank}",
                "Divide the sum of the losses by the number of terms in the global batch, over all ranks and micro-batches",
                high,
                CHAPTER,
            )
        # Without a mean of its own, the script may add up a sample's elements, and take the mean over the samples.
        sizes = ("terms",) if high["is_mean"] else ("terms", "samples")
        of_sizes = [sum(loss["weight"] * loss[size] for _, loss in losses) / ranks for size in sizes]
        is_one = any(math.isclose(total, 1, rel_tol=TOLERANCE) for total in of_sizes)
        totals.append((1.0 if is_one else of_sizes[0], high))
        passes = max(passes, *map(len, of_call))
    if not totals or passes > len(steps[0].all("backward")):
        return None  # a call in a loop, such as over the heads of a network
    together, (least, of_least) = sum(total for total, _ in totals), min(totals, key=lambda one: one[0])
    if any(loss["gathered"] for _, loss in totals):
        # Each rank's loss is that of the global batch, and leads to its own part of the gradient.
        if math.isclose(together, 1, rel_tol=TOLERANCE):
            return Finding(
                f"the gradient is too small by a factor of {ranks}: each rank computes the loss of the gathered batch, and gets the "
                "gradient of its own part; the parts should be added, and DDP averages them",
                "Multiply the loss by the number of ranks",
                of_least,
                CHAPTER,
            )
        return None
    # A loss may have a coefficient. So only what all losses of a step have in common is wrong.
    if math.isclose(least, 1, rel_tol=TOLERANCE):
        return None
    got = factor_of(steps)
    least, together = least * got, together * got
    too_large = least > 1.5 and math.isclose(least, round(least), rel_tol=TOLERANCE) and passes % round(least) == 0
    if too_large:
        return Finding(
            f"the loss is not divided by the {passes} micro-batches of a step: the weights of all terms sum to {least:.3g} and not to 1",
            f"Divide each micro-batch's mean loss by {passes}",
            of_least,
            CHAPTER,
        )
    if ranks > 1 and math.isclose(together, 1 / ranks, rel_tol=TOLERANCE):
        return Finding(
            f"the weights of all terms sum to {together:.3g}, which is 1 / the number of ranks",
            "DDP divides by the number of ranks: do not divide the loss by it, and multiply by it if you divide by a count of all ranks",
            of_least,
            CHAPTER,
            is_hint=True,
        )
    if ranks > 1 and any(math.isclose(least, factor, rel_tol=TOLERANCE) for factor in (ranks, ranks * passes)):
        return Finding(
            f"the weights of all terms sum to {least:.3g} and not to 1: the loss is multiplied by the number of ranks",
            "DDP divides by the number of ranks: weigh each term by 1 / the terms of the global batch x ranks, no more",
            of_least,
            CHAPTER,
        )
    return None
