"""Gradients are clipped once per step: all of them, after the last micro-batch, after unscaling, by a norm that all ranks share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ddp.audit.detectors.finding import Finding
from ddp.audit.trace import Event, Step, Trace

CHAPTER = "ddp/README.md, chapter 6"
TOLERANCE = 1e-2
SAME = 1e-5


def detect(trace: Trace) -> Iterator[Finding]:
    for steps in trace.steps():
        yield from _order(steps)
        if trace.world_size > 1:
            yield from _norms(trace, steps)


def _order(steps: Sequence[Step]) -> Iterator[Finding]:
    for rank, step in enumerate(steps):
        events = step.all("clip", "unscale", "backward", "scale")
        names = [event["kind"] for event in events]
        if "clip" in names:
            at = names.index("clip")
            clip, scale = events[at], step.last("scale").get("scale")
            if "scale" in names and "unscale" not in names[:at]:
                yield Finding(
                    f"gradients are clipped before they are unscaled: they are {scale:,.0f} times too large"
                    + (f", with a norm of {clip['norm']:.4g}" if clip["norm"] is not None else ""),
                    "Call scaler.unscale_(optimizer) before clip_grad_norm_",
                    clip,
                    CHAPTER,
                    rank,
                )
            if "backward" not in names[:at]:
                yield Finding(
                    "gradients are clipped after the optimizer step, which does not see it",
                    "Clip between the last backward pass and the optimizer step",
                    clip,
                    CHAPTER,
                    rank,
                )
            elif "backward" in names[at:]:
                yield Finding(
                    "gradients are clipped before the last micro-batch's backward pass, which adds to them unclipped",
                    "Clip once per step, after the last backward pass",
                    clip,
                    CHAPTER,
                    rank,
                )
        before = step.last("before_step")
        if "scale" in names and not before["scaler"] and "unscale" not in names:
            yield Finding(
                f"the optimizer steps with gradients that are {step.last('scale')['scale']:,.0f} times too large",
                "Call scaler.step(optimizer), which unscales them and leaves out steps with inf",
                before,
                CHAPTER,
                rank,
            )


def _norms(trace: Trace, steps: Sequence[Step]) -> Iterator[Finding]:
    clips = [step.all("clip") for step in steps]
    counts = list(map(len, clips))
    if len(set(counts)) > 1:
        clipping, other = counts.index(max(counts)), counts.index(min(counts))
        yield Finding(
            f"rank {clipping} clips its gradients and rank {other} does not, so the ranks step with different ones",
            "Clip on all ranks",
            clips[clipping][0],
            CHAPTER,
            clipping,
            diverges=True,
        )
        return
    for of_ranks in zip(*clips, strict=True):
        norms = [clip["norm"] for clip in of_ranks]
        if None in norms or not all(map(math.isfinite, norms)):
            continue
        if max(norms) > (1 + TOLERANCE) * min(norms):
            yield Finding(
                f"the gradients are clipped by norms that differ between ranks: {_list(norms)}",
                "Clip after the gradients are averaged; of sharded gradients, sum the squared norms over the ranks",
                of_ranks[0],
                CHAPTER,
                diverges=True,
                is_effect=True,
            )
            return
    yield from _by_hand(trace, steps)


def _by_hand(trace: Trace, steps: Sequence[Step]) -> Iterator[Finding]:
    """Norms that the script sums over the ranks itself, though the gradients are averaged and not sharded."""
    norms = [_norm(step) for step in steps]
    norm = norms[0]
    if norm is None or not all(one is not None and math.isclose(one, norm, rel_tol=SAME) for one in norms):
        return
    for event in _scalars_after_backward(steps[0]):
        for value, name in ((norm, "norm"), (norm**2, "squared norm")):
            again = math.isclose(event["after"], event["before"] * trace.world_size, rel_tol=SAME)
            if again and math.isclose(event["before"], value, rel_tol=SAME):
                yield Finding(
                    f"the {name} of the averaged gradients is summed over the ranks again: {event['before']:.4g} becomes "
                    f"{event['after']:.4g}",
                    "After averaging, each rank's norm is the global norm already: do not all-reduce it",
                    event,
                    CHAPTER,
                )
                return


def _norm(step: Step) -> float | None:
    value = step.last("backward").get("norm")
    return float(value) if value else None


def _scalars_after_backward(step: Step) -> list[Event]:
    """All-reduces of one number between the last backward pass and the optimizer step."""
    kinds = [event["kind"] for event in step.events]
    after = step.events[len(kinds) - kinds[::-1].index("backward") :] if "backward" in kinds else []
    return [event for event in after if event["kind"] == "collective" and event["before"] is not None]


def _list(norms: Sequence[float]) -> str:
    return ", ".join(f"{norm:.4g} on rank {rank}" for rank, norm in enumerate(norms))
