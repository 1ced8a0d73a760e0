"""The benchmark's measurements in words: the batch size from which data parallelism pays, and the parts of the time.

Every number was measured, or is a difference or ratio of measured numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.reporting.timing import Spread, paired_ratio
from dataparallel.bench.variants import HANDWRITTEN, ONE_DEVICE, PLAIN, PROCESSES, TORCH, Comparison

SUSPICIOUS_SPREAD = 2.0  # ratio of the quartiles of one variant's rounds
SUSPICIOUS_GAIN = 0.7  # ratio of a larger batch's time to that of a smaller one


@dataclass(frozen=True)
class Point:
    """The measurements of one batch size in one mode.

    :param mode: of :data:`dataparallel.bench.variants.MODES`
    :param batch_size: samples per call, over all devices
    :param seconds: for each variant its seconds per call, one entry per round
    :param timed: the handwritten variant whose steps were timed
    :param steps: for each variant with timed steps, one entry per round: the seconds per call of each step
    """

    mode: str
    batch_size: int
    seconds: dict[str, list[float]]
    timed: str
    steps: dict[str, list[dict[str, float]]]

    def median(self, name: str) -> float:
        """The median seconds per call."""
        return statistics.median(self.seconds[name])

    def median_steps(self) -> dict[str, float]:
        """The median seconds per call of each step by hand, in their order; ``rest`` is the time between them."""
        rounds = self.steps[self.timed]
        steps = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        rest = [total - sum(one.values()) for total, one in zip(self.seconds[self.timed], rounds, strict=True)]
        return {**steps, "rest": max(0.0, statistics.median(rest))}

    def process_forward(self) -> float:
        """The median seconds of the forward pass in the slowest process."""
        return statistics.median(one["forward"] for one in self.steps[PROCESSES])

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def explain(comparison: Comparison, points: Sequence[Point]) -> list[str]:
    """The whole explanation, as lines of text."""
    lines = _rows(comparison)
    for mode in dict.fromkeys(point.mode for point in points):
        ours = [point for point in points if point.mode == mode]
        lines += ["", *_table(ours), "", *_doubts(ours), *_crossovers(comparison, ours), *_reasons(comparison, ours)]
    return lines


def _rows(comparison: Comparison) -> list[str]:
    """The variants on this machine, in words."""
    count = len(comparison.devices)
    if not comparison.on_cpu:
        return []
    lines = [
        f"CPU devices: '{HANDWRITTEN}' uses {count} threads of this process as devices, '{PROCESSES}' {count} "
        f"processes, each with {_threads_of_one(comparison)}; '{PLAIN}' uses all {torch.get_num_threads()}, and "
        f"'{ONE_DEVICE}' as many as one device"
    ]
    if not torch.cuda.is_available():
        lines.append(f"'{TORCH}' passes its input through to the plain module on a machine without GPUs: the same work")
    return lines


def _threads_of_one(comparison: Comparison) -> str:
    share = comparison.threads_of_one
    return f"{share} intra-op thread{'s' * (share > 1)}"


def _table(points: Sequence[Point]) -> list[str]:
    """Medians in ms: the variants, and below them the steps by hand."""
    steps = [point.median_steps() for point in points]
    sums = [sum(one.values()) / point.median(point.timed) for one, point in zip(steps, points, strict=True)]
    rows = {name: [1e3 * point.median(name) for point in points] for name in points[0].seconds}
    rows |= {f"  {step}": [1e3 * one[step] for one in steps] for step in steps[0]}
    return [
        f"{points[0].mode + ', ms per call; batch size':<34}" + "".join(f"{point.batch_size:>10}" for point in points),
        *(f"{name:<34}" + "".join(f"{value:>10.2f}" for value in values) for name, values in rows.items()),
        f"{'  the steps, of the measured time':<34}" + "".join(f"{100 * share:>8.0f} %" for share in sums),
    ]


def _doubts(points: Sequence[Point]) -> list[str]:
    """Signs that other work disturbed the measurement."""
    doubts = []
    for name in points[0].seconds:
        for point in points:
            spread = Spread.of(point.seconds[name])
            if spread.high > SUSPICIOUS_SPREAD * spread.low:
                doubts.append(f"{name} at {point.batch_size} took {1e3 * spread.low:.1f} to {1e3 * spread.high:.1f} ms")
        for point, larger in itertools.pairwise(points):
            if larger.median(name) < SUSPICIOUS_GAIN * point.median(name):
                doubts.append(f"{name} at {larger.batch_size} took less time than at {point.batch_size}")
    if not doubts:
        return []
    return [
        f"do not trust this: {'; '.join(doubts)}. Other work used the machine; run the benchmark again when it is idle"
    ]


def _crossovers(comparison: Comparison, points: Sequence[Point]) -> list[str]:
    """The batch size from which each variant is faster than the plain module."""
    names = [HANDWRITTEN, PROCESSES] if comparison.on_cpu else [TORCH, HANDWRITTEN, PROCESSES]
    lines = []
    for name in names:
        size = crossover(points, name)
        speedups = {point.batch_size: _speedup(point, name, PLAIN) for point in points}
        best = max(speedups, key=lambda batch_size: speedups[batch_size].median)
        faster = [str(point.batch_size) for point in points if _speedup(point, name, PLAIN).low > 1]
        if size:
            verdict = f"faster than the {PLAIN} from batch size {size} on"
        elif faster:
            verdict = f"faster than the {PLAIN} at batch size {', '.join(faster)}, but not at larger ones"
        else:
            verdict = f"never faster than the {PLAIN} on this machine, at these batch sizes"
        lines.append(f"{name}: {verdict}; at best {speedups[best]:.2f}x, at batch size {best}")
    if comparison.on_cpu:
        speedups = {point.batch_size: _speedup(point, HANDWRITTEN, ONE_DEVICE) for point in points}
        best = max(speedups, key=lambda batch_size: speedups[batch_size].median)
        count = len(comparison.devices)
        lines.append(f"{count} devices by hand are {speedups[best]:.2f}x as fast as one of them, at batch size {best}")
    return lines


def crossover(points: Sequence[Point], name: str, against: str = PLAIN) -> int | None:
    """The smallest batch size from which ``name`` is faster at all sizes, in three of four rounds each."""
    size = None
    for point in reversed(points):
        if _speedup(point, name, against).low <= 1:
            break
        size = point.batch_size
    return size


def _speedup(point: Point, name: str, against: str) -> Spread:
    return paired_ratio(point.seconds[against], point.seconds[name])


def _reasons(comparison: Comparison, points: Sequence[Point]) -> list[str]:
    """The parts of the time, at the smallest and the largest batch."""
    ends = [points[0]] if len(points) == 1 else [points[0], points[-1]]
    lines = []
    for point in ends:
        steps = point.median_steps()
        total = sum(steps.values())
        lines.append(f"why, at batch size {point.batch_size}:")
        lines.append(_copying(comparison, steps, total))
        if comparison.on_cpu:
            lines.append(_threads(comparison, point, steps))
        if "backward" in steps:
            lines.append(_backward(comparison, steps, total))
        lines.append(_first_device(comparison, steps, total))
    return lines


def _copying(comparison: Comparison, steps: dict[str, float], total: float) -> str:
    further = len(comparison.devices) - 1
    text = (
        f"  - replicate, {_share(steps, total, 'replicate')}: {comparison.megabytes:.1f} MB of parameters and buffers go to "
        f"{further} further device{'s' * (further > 1)} in every call, whatever the batch"
    )
    if "reduce" in steps:
        text += f"; and the gradients come back: reduce, {_share(steps, total, 'reduce')}"
        return f"{text}. Processes keep their replicas, and all-reduce the gradients"
    return f"{text}. Processes keep their replicas"


def _threads(comparison: Comparison, point: Point, steps: dict[str, float]) -> str:
    count = len(comparison.devices)
    own, alone = steps["forward"], point.process_forward()
    text = f"  - forward: the replicas' threads take {1e3 * own:.2f} ms, the same parts in {count} processes {1e3 * alone:.2f}"
    if own > 1.1 * alone:
        lost = 1e3 * (own - alone)
        text += (
            f": {lost:.2f} ms are lost because threads share one process. This benchmark cannot tell waiting for the GIL from "
            "waking up"
        )
        if "backward" in steps:
            text += "; OpenMP threads that helped in backward also still spin (OMP_WAIT_POLICY=passive prevents that)"
        return text
    if alone > 1.1 * own:
        return f"{text}: that the threads share one process costs nothing here"
    return f"{text}: being threads of one process, with its GIL, costs little here"


def _backward(comparison: Comparison, steps: dict[str, float], total: float) -> str:
    text = f"  - backward, {_share(steps, total, 'backward')}: "
    if comparison.on_cpu:
        return (
            f"{text}on the CPU, autograd runs one replica's backward pass after the other's, in the calling thread, which "
            f"has all {torch.get_num_threads()} intra-op threads for it"
        )
    return f"{text}autograd has a thread for each GPU, and all of them share the GIL where Python is called"


def _first_device(comparison: Comparison, steps: dict[str, float], total: float) -> str:
    text = f"  - scatter, {_share(steps, total, 'scatter')}, and gather, {_share(steps, total, 'gather')}"
    if "loss" not in steps:
        return f"{text}: the cost of moving the batch"
    loss, optimizer = (_share(steps, total, step) for step in ("loss", "optimizer"))
    place = "in the calling thread" if comparison.on_cpu else "on the first device, while the others idle"
    return f"{text}; loss, {loss}, and optimizer, {optimizer}: {place}"


def _share(steps: dict[str, float], total: float, name: str) -> str:
    return f"{1e3 * steps[name]:.2f} ms ({100 * steps[name] / total:.0f} %)"
