"""Gradients are clipped once per step: all of them, after the last micro-batch, after unscaling, by a norm that all ranks share."""

from __future__ import annotations

import math

from ddp.audit.detectors.averages import factor_of
from ddp.audit.finding import Finding, Findings
from ddp.audit.trace import Events, Step, Trace, together
from ddp.audit.watch.event_types import Backward, Clip, Collective, Scale, Unscale

TOLERANCE = 1e-2
SAME = 1e-5


def detect(trace: Trace) -> Findings:
    for steps in trace.steps():
        for rank, step in enumerate(steps):
            yield from _order(rank, step)
        yield from _norms(steps)


def _order(rank: int, step: Step) -> Findings:
    scales, clips = step.all(Scale), step.all(Clip)
    if clips:
        clip = clips[0]
        at = step.events.index(clip)
        before, after = Events(step.events[:at]), Events(step.events[at:])
        if scales and not before.all(Unscale):
            yield Finding(
                "scaled-clipping",
                clip,
                f"gradients are clipped before they are unscaled: they are {step.scale:,.0f} times too large"
                + (f", with a norm of {clip.norm:.4g}" if clip.norm is not None else ""),
                rank,
            )
        if not before.all(Backward):
            yield Finding("clipping-after-step", clip, rank=rank)
        elif after.all(Backward):
            yield Finding("clipping-each-micro-batch", clip, rank=rank)
    if scales and not step.before.scaler and not step.all(Unscale):
        yield Finding(
            "never-unscaled",
            step.before,
            f"the optimizer steps with gradients that are {step.scale:,.0f} times too large",
            rank,
        )


def _norms(steps: list[Step]) -> Findings:
    counts = [len(step.all(Clip)) for step in steps]
    clipping, other = counts.index(max(counts)), counts.index(min(counts))
    if clipping != other:
        yield Finding(
            "clipping-on-one-rank",
            steps[clipping].all(Clip)[0],
            f"rank {clipping} clips its gradients and rank {other} does not, so the ranks step with different ones",
            clipping,
            diverges=True,
        )
        return
    for clips in together(steps, Clip):
        norms = [clip.norm for clip in clips if clip.norm is not None]
        if len(norms) == len(clips) and (1 + TOLERANCE) * min(norms) < max(norms) < math.inf:
            listed = ", ".join(f"{norm:.4g} on rank {rank}" for rank, norm in enumerate(norms))
            yield Finding(
                "norms-differ",
                clips[0],
                f"the gradients are clipped by norms that differ between ranks: {listed}",
                diverges=True,
                is_effect=True,
            )
            return
    yield from _by_hand(steps)


def _by_hand(steps: list[Step]) -> Findings:
    """Norms that the script sums over the ranks itself, though the gradients are averaged and not sharded."""
    last = steps[0].last(Backward)
    norm = (last and last.norm) or 0.0
    clipped_by = [clip.norm for clip in steps[0].all(Clip)]
    for event in steps[0].all(Collective):
        for before, after in zip(event.before, event.after, strict=True):  # of tensors with few elements
            for power, name in ((1, "norm"), (2, "squared norm")):
                is_sum = all(math.isclose(one, norm**power, rel_tol=SAME) for one in (before, after / len(steps)))
                is_used = any(one and math.isclose(one, abs(after) ** (1 / power), rel_tol=SAME) for one in clipped_by)
                if before and is_sum and (is_used or not math.isclose(factor_of(steps), 1, rel_tol=TOLERANCE)):
                    yield Finding(
                        "norm-summed-twice",
                        event,
                        f"the {name} of the averaged gradients is summed over the ranks again: {before:.4g} becomes {after:.4g}",
                    )
                    return
