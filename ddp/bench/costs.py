"""Where each millisecond goes that a synchronized step takes beyond one without synchronization (``python -m ddp.bench costs``).

Each DDP is taken apart into variants that each do one thing more, on the models and by the turns of ``ddp.bench engines``:

    no synchronization  ->  + hooks  ->  + copies  ->  + sums: the whole wrapper

- hooks: autograd calls the reducer for each gradient, and the reducer counts. (torch's cannot be had without the copies.)
- copies: each gradient is divided, and copied into its bucket; the optimizer reads it there.
- sums: the all-reduce of each bucket: what a rank computes, copies and sends for it.

What a part costs is the difference of two variants' processor times, round by round. It counts all threads of a rank: where a rank
has one core, a thread in the background takes its time from the computation. What the whole wrapper takes beyond these parts is
waiting: for the slower rank, for a thread to wake up, for the last bucket. So overlap can hide waiting, but not work.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.cli import option
from common.reporting.benchmark_figures import plot_stacked
from common.reporting.timing import Spread
from common.reporting.turns import Times, cells, progress_of, table, write_report
from ddp.bench.turns import Comparison, TurnsConfig, compare
from ddp.bench.variants import FLOOR, NETWORKS, NO_SUM, ON_THE_CPU, DDPVariant

HOOKS, COPIES, HOOKS_AND_COPIES, SUMS, WAITING = "hooks", "copies", "hooks and copies", "sums", "waiting"
PARTS = (HOOKS, COPIES, HOOKS_AND_COPIES, SUMS, WAITING)
WHOLE = "the whole"

_hooks_alone = DDPVariant("handwritten", hook=NO_SUM, copies=False)
# For each DDP and part, the variant that has it beside all parts before; the last variant is the whole DDP.
DDPS: Mapping[str, Mapping[str, DDPVariant]] = {
    "torch, gloo": {HOOKS_AND_COPIES: DDPVariant("torch", hook=NO_SUM), SUMS: DDPVariant("torch")},
    "by hand, gloo": {
        HOOKS: _hooks_alone,
        COPIES: DDPVariant("handwritten", hook=NO_SUM),
        SUMS: DDPVariant("handwritten"),
    },
    "by hand, shared memory": {
        HOOKS: _hooks_alone,
        COPIES: DDPVariant("handwritten", hook=NO_SUM, all_reduce="shared-memory"),
        SUMS: DDPVariant("handwritten", all_reduce="shared-memory"),
    },
}
# A variant that two DDPs share is measured once.
VARIANTS = {FLOOR: DDPVariant("none")} | {str(one): one for parts in DDPS.values() for one in parts.values()}


@dataclass(frozen=True)
class Config(TurnsConfig):
    """Settings of ``ddp.bench costs``."""

    models: tuple[str, ...] = option(ON_THE_CPU, "models on which the DDPs are taken apart", choices=NETWORKS)
    output: Path = option(Path("runs/bench-costs"), "folder of the JSON and the figure")


def measure(config: Config) -> list[Comparison]:
    """Measure all variants on each model."""
    with progress_of(config, len(config.models)) as progress:
        steps = {m: {name: functools.partial(one.step, m) for name, one in VARIANTS.items()} for m in config.models}
        return [compare(config, model, own, [FLOOR], progress) for model, own in progress.until_stopped(steps.items())]


def costs(times: Comparison) -> dict[str, dict[str, list[float]]]:
    """For each DDP, the milliseconds per step of each part and of the whole, round by round.

    :param times: of :data:`VARIANTS`
    """
    costs = {}
    for ddp, variants in DDPS.items():
        names = [FLOOR, *map(str, variants.values())]
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


def report(config: Config, comparisons: list[Comparison]) -> str:
    """Write the JSON and the figure, and return the tables to print."""
    title = f"{config.placement}; {config.builds} x {config.rounds} rounds"
    lines = [f"{title}, milliseconds per step, median [quartiles] of the differences round by round"]
    models, panels = [], {}
    for of_model in comparisons:
        model = of_model.title
        step, of_ddps = [1e3 * seconds for seconds in of_model.seconds[FLOOR]], costs(of_model)
        models.append({"model": model, "step": step, "parts": of_ddps})
        medians = [{part: statistics.median(values) for part, values in parts.items()} for parts in of_ddps.values()]
        for ddp in medians:  # medians of parts do not quite add up to that of the whole
            ddp[WAITING] += ddp.pop(WHOLE) - sum(ddp.values())
        panels[model] = {part: [ddp.get(part, 0.0) for ddp in medians] for part in PARTS}
        texts = {ddp: cells(parts, ".2f") for ddp, parts in of_ddps.items()}
        lines += ["", f"{model}: a step without synchronization takes {Spread.of(step):.2f}"]
        lines += table({ddp: {part: own.get(part, "-") for part in (*PARTS, WHOLE)} for ddp, own in texts.items()})
    plot_stacked(
        config.output / "costs.png",
        panels,
        list(DDPS),
        x_title="ms per step beyond one without synchronization",
        title=f"what each part of a DDP costs: {title}",
    )
    return write_report(config, "costs", {"models": models}, ["costs"], lines)
