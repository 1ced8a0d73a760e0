"""The benchmark's table and its verdict: from which batch size on it pays, and which step takes the time.

Every number was measured, or is a ratio of measured numbers.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from common.benchmarking.timing import Spread, paired_ratio
from common.benchmarking.turns import table
from dataparallel.bench.variants import HANDWRITTEN, MODES, PLAIN, STEP_BY_STEP, TORCH


@dataclass(frozen=True, eq=False)
class Point:
    """The measurements of one batch size in one mode.

    :param mode: of :data:`dataparallel.bench.variants.MODES`
    :param batch_size: samples per call, over all devices
    :param seconds: for each variant its seconds per call, one entry per round
    :param steps: one entry per round: the seconds per call of each step by hand
    """

    mode: str
    batch_size: int
    seconds: dict[str, list[float]]
    steps: list[dict[str, float]]

    def median(self, name: str) -> float:
        """The median seconds per call."""
        return statistics.median(self.seconds[name])

    def median_steps(self) -> dict[str, float]:
        """The median seconds per call of each step by hand, in their order; ``rest`` is the time between them."""
        steps = {name: statistics.median(one[name] for one in self.steps) for name in self.steps[0]}
        rest = [total - sum(one.values()) for total, one in zip(self.seconds[STEP_BY_STEP], self.steps, strict=True)]
        return {**steps, "rest": max(0.0, statistics.median(rest))}

    def speedup(self, name: str) -> Spread:
        """How many times as fast as the plain module, round by round."""
        return paired_ratio(self.seconds[PLAIN], self.seconds[name])


def explain(points: Sequence[Point]) -> list[str]:
    """The table of each mode, and the verdict below it."""
    lines = []
    for mode in MODES:
        ours = [point for point in points if point.mode == mode]
        columns = {}
        for point in ours:
            times = {name: point.median(name) for name in point.seconds}
            times |= {f"  {step}": seconds for step, seconds in point.median_steps().items()}
            columns[str(point.batch_size)] = {name: f"{1e3 * seconds:.2f}" for name, seconds in times.items()}
        lines += ["", f"{mode}, ms per call by batch size", *table(columns, 10)]
        lines += [_verdict(ours, name) for name in (TORCH, HANDWRITTEN) if name in ours[0].seconds]
    return lines


def _verdict(points: Sequence[Point], name: str) -> str:
    """The batch size from which a variant is faster than the plain module, and its best speedup."""
    size = crossover(points, name)
    best = max(points, key=lambda point: point.speedup(name).median)
    if size:
        faster = f"faster than the {PLAIN} from batch size {size} on"
    elif best.speedup(name).within_noise():
        faster = f"within the noise as fast as the {PLAIN}"
    else:
        faster = f"not faster than the {PLAIN} at large batches"
    return f"{name}: {faster}; at best {best.speedup(name):.2f}x, at batch size {best.batch_size}"


def crossover(points: Sequence[Point], name: str) -> int | None:
    """The smallest batch size from which ``name`` is faster than the plain module at all sizes, in three of four rounds each."""
    size = None
    for point in reversed(points):
        if point.speedup(name).low <= 1:
            break
        size = point.batch_size
    return size
