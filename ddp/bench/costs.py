"""Where each millisecond goes that a synchronized step takes beyond one without synchronization (a table of ``ddp.bench engines``).

Each DDP is taken apart into variants that each do one thing more:

    no synchronization  ->  + hooks  ->  + copies  ->  + sums: the whole wrapper

- hooks: autograd calls the reducer for each gradient, and the reducer counts. (torch's cannot be had without the copies.)
- copies: each gradient is divided, and copied into its bucket; the optimizer reads it there.
- sums: the all-reduce of each bucket: what a rank computes, copies and sends for it.

What a part costs is the difference of two variants' processor times, round by round. It counts all threads of a rank: where a rank
has one core, a thread in the background takes its time from the computation. What the whole wrapper takes beyond these parts is
waiting: for the slower rank, for a thread to wake up, for the last bucket. So overlap can hide waiting, but not work.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from common.benchmarking.figures import plot_stacked
from common.benchmarking.timing import Spread
from common.benchmarking.turns import Times, cells, table
from ddp.bench.comparison import Comparison
from ddp.bench.variants import BY_HAND, FLOOR, HOOKED, NO_SUM, SHARED, VIEWS, DDPVariant

HOOKS, COPIES, HOOKS_AND_COPIES, SUMS, WAITING = "hooks", "copies", "hooks and copies", "sums", "waiting"
PARTS = (HOOKS, COPIES, HOOKS_AND_COPIES, SUMS, WAITING)
WHOLE = "the whole"

TORCH_COPIES, HAND_HOOKS = "torch DDP, nothing sent", "handwritten, hooks alone"
HAND_COPIES, SHARED_COPIES = "handwritten, nothing sent", "handwritten, shared memory, nothing sent"
# Variants that are measured only to take the others apart.
PARTIAL: Mapping[str, DDPVariant] = {
    TORCH_COPIES: DDPVariant("torch", hook=NO_SUM),
    HAND_HOOKS: DDPVariant("handwritten", hook=NO_SUM, copies=False),
    HAND_COPIES: DDPVariant("handwritten", hook=NO_SUM),
    SHARED_COPIES: DDPVariant("handwritten", hook=NO_SUM, all_reduce="shared-memory"),
}
# For each DDP and part, the variant that has it beside all parts before; the last variant is the whole DDP.
DDPS: Mapping[str, Mapping[str, str]] = {
    "torch, gloo": {HOOKS_AND_COPIES: TORCH_COPIES, SUMS: VIEWS},
    "torch, shared memory": {HOOKS_AND_COPIES: TORCH_COPIES, SUMS: HOOKED},
    "by hand, gloo": {HOOKS: HAND_HOOKS, COPIES: HAND_COPIES, SUMS: BY_HAND},
    "by hand, shared memory": {HOOKS: HAND_HOOKS, COPIES: SHARED_COPIES, SUMS: SHARED},
}


def costs(times: Comparison) -> dict[str, dict[str, list[float]]]:
    """For each DDP, the milliseconds per step of each part and of the whole, round by round."""
    costs = {}
    for ddp, variants in DDPS.items():
        names = [FLOOR, *variants.values()]
        parts = {
            part: _differences(times.processor_seconds, now, before)
            for part, before, now in zip(variants, names, names[1:], strict=False)
        }
        whole = _differences(times.seconds, names[-1], FLOOR)
        computed = _differences(times.processor_seconds, names[-1], FLOOR)
        costs[ddp] = {**parts, WAITING: [a - b for a, b in zip(whole, computed, strict=True)], WHOLE: whole}
    return costs


def _differences(times: Times, more: str, less: str) -> list[float]:
    """In milliseconds, round by round."""
    return [1e3 * (a - b) for a, b in zip(times[more], times[less], strict=True)]


def report_costs(path: Path, comparisons: list[Comparison], title: str) -> list[str]:
    """Draw the parts of each DDP on each model, and return their tables."""
    lines = ["", "milliseconds per step, median [quartiles] of the differences round by round:"]
    panels = {}
    for of_model in comparisons:
        of_ddps = costs(of_model)
        medians = [{part: statistics.median(values) for part, values in parts.items()} for parts in of_ddps.values()]
        for ddp in medians:  # medians of parts do not quite add up to that of the whole
            ddp[WAITING] += ddp.pop(WHOLE) - sum(ddp.values())
        panels[of_model.title] = {part: [ddp.get(part, 0.0) for ddp in medians] for part in PARTS}
        texts = {ddp: cells(parts, ".2f") for ddp, parts in of_ddps.items()}
        step = Spread.of([1e3 * seconds for seconds in of_model.seconds[FLOOR]])
        lines += ["", f"{of_model.title}: a step without synchronization takes {step:.2f}"]
        lines += table({ddp: {part: own.get(part, "-") for part in (*PARTS, WHOLE)} for ddp, own in texts.items()})
    x_title = "ms per step beyond one without synchronization"
    plot_stacked(path, panels, list(DDPS), x_title=x_title, title=f"what each part of a DDP costs: {title}")
    return lines
