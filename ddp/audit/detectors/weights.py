"""In one optimizer step all terms of the loss must have the same weight, and the weights must sum to 1.

A weight is what a loss function's terms are multiplied with on the way to the gradient: the mean, divisions by the number of
micro-batches, whatever the script does. DDP's average over the ranks comes on top.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from operator import attrgetter

from ddp.audit.detectors.averages import factor_of
from ddp.audit.finding import Finding, Findings
from ddp.audit.trace import Step, Trace
from ddp.audit.watch.event_types import Backward, Loss, PutBack

equal = functools.partial(math.isclose, rel_tol=1e-3)
SLIGHT = 0.05  # weights that differ by less, as with a few ignored labels, are a hint


def detect(trace: Trace) -> Findings:
    short = list(_short_windows(trace))
    found = [finding for steps in trace.steps() for finding in _of_step(steps)]
    if short:  # one may be 1 / ranks long
        found = short + [finding for finding in found if finding.name != "loss-divided-by-ranks"]
    yield from sorted(found, key=attrgetter("is_hint"))  # the first at a line stays: a slight one hides no other


def _short_windows(trace: Trace) -> Findings:
    """Steps of fewer micro-batches than others, such as an epoch's last, whose weights sum to that part of 1."""
    windows: list[tuple[int, float, Backward]] = []
    for steps in trace.steps():
        losses = [loss for rank, step in enumerate(steps) for loss in _losses(rank, step)]
        if losses and steps[0].passes:
            total = sum(loss.weight * loss.terms for loss in losses) / len(steps)
            windows.append((len(steps[0].passes), total, steps[0].passes[-1]))
    most = max((count for count, _, _ in windows), default=0)
    is_divided = any(count == most and equal(total, 1) for count, total, _ in windows)
    for count, total, backward in windows:
        if is_divided and count < most and equal(total, count / most):
            text = f"a step of {count} micro-batch{'es' * (count > 1)} is divided by {most}: the weights of all terms sum to {total:.3g}"
            yield Finding("short-window", backward, text)
            return


def why_not(steps: list[Step]) -> str:
    """Why a step cannot be judged; empty if it can."""
    return "" if any(step.losses for step in steps) else "no loss of torch.nn.functional was seen"


class _Loss(Loss):
    """A loss, with the weight of a term in the step.

    :ivar total: the weights of all terms of its call together, averaged over the ranks
    """

    rank: int
    total: float = 0.0


def _losses(rank: int, step: Step) -> list[_Loss]:
    scale = step.scale
    return [
        _Loss(**vars(loss) | {"weight": abs(loss.weight) / scale, "rank": rank}) for loss in step.losses if loss.terms
    ]


def _of_step(steps: list[Step]) -> Findings:
    ranks, passes = len(steps), 1
    # For each call in the script, and its turn in a loop within a pass, such as over the layers of a network.
    by_turn: dict[tuple[str, int], list[_Loss]] = {}
    for rank, step in enumerate(steps):
        by_call: dict[str, list[_Loss]] = {}
        for loss in _losses(rank, step):
            by_call.setdefault(loss.call, []).append(loss)
        for call, own in by_call.items():
            passes = max(passes, len(own))
            turns = len(own) // (len(step.passes) or 1) or 1
            for turn in range(turns):
                by_turn.setdefault((call, turn), []).extend(own[turn::turns])
    totals: list[_Loss] = []  # one loss of each
    for losses in by_turn.values():
        if not all(0 < loss.weight < math.inf for loss in losses):
            return
        losses.sort(key=attrgetter("weight"))
        low, high = losses[0], losses[-1]
        if low.terms != high.terms and not equal(low.weight, high.weight):
            is_slight = math.isclose(low.weight, high.weight, rel_tol=SLIGHT)
            yield Finding(
                "mean-of-means",
                high,
                f"a mean of means: a term of the loss weighs {high.weight:.4g} in a micro-batch of {high.terms} terms on rank "
                f"{high.rank}, and {low.weight:.4g} in one of {low.terms} on rank {low.rank}",
                is_hint=is_slight,
            )
            if not is_slight:
                return
        total = sum(loss.weight * loss.terms for loss in losses) / ranks
        if not high.is_mean and equal(sum(loss.weight * loss.samples for loss in losses) / ranks, 1):
            total = 1.0  # the script adds up a sample's elements, and takes the mean over the samples
        totals.append(replace(high, total=total))
    if not totals or passes > len(steps[0].computed):
        return  # a call in a loop, such as over the heads of a network
    of_least = min(totals, key=attrgetter("total"))
    together, least = sum((loss.total for loss in totals), 0.0), of_least.total
    if any(step.all(PutBack) for step in steps):
        # A batch was gathered from all ranks. Each rank's loss is that of the global batch, and leads to its own part of the gradient.
        if equal(together, 1):
            yield Finding(
                "gathered-without-gradient",
                of_least,
                "each rank gets the gradient of its own part of the gathered batch; the parts should be added, and DDP averages them, so "
                f"where each rank computes the loss of the whole batch, the gradient is too small by a factor of {ranks}",
            )
        return
    # A loss may have a coefficient. So only what all losses of a step have in common is wrong.
    if equal(least, 1):
        return
    got = factor_of(steps)
    least, together = least * got, together * got
    if least > 1.5 and equal(least, round(least)) and passes % round(least) == 0:
        yield Finding(
            "loss-not-divided",
            of_least,
            f"the loss is not divided by the {passes} micro-batches of a step: the weights of all terms sum to {least:.3g} and not to 1",
        )
    # If gradients of other passes were cleared, their sums may be kept elsewhere.
    elif equal(together, 1 / ranks) and steps[0].passes == steps[0].all(Backward):
        yield Finding(
            "loss-divided-by-ranks",
            of_least,
            f"the weights of all terms sum to {together:.3g}, which is 1 / the number of ranks",
        )
    elif equal(least, ranks) or equal(least, ranks * passes):
        yield Finding(
            "loss-multiplied-by-ranks",
            of_least,
            f"the weights of all terms sum to {least:.3g} and not to 1: the loss is multiplied by the number of ranks",
        )
