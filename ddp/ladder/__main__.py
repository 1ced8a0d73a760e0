"""From the usual first script to the fastest run, one change at a time.

    python -m ddp.ladder                     # on Fashion-MNIST where it is found, else on drawn glyphs

A rung is the training loop of the one before with one change (ddp/ladder/rungs.py). Beside the rungs stand the script of torch's
DDP tutorial and ``ddp.train`` itself (ddp/ladder/ours.py). In a clone, ``python -m maintain.ladder_peers`` measures Accelerate and
Lightning, too. All train the same network by the same recipe, and take turns of a quarter of an epoch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.cli import command, option
from common.data import fashion_mnist
from common.data.datasets import IN_MEMORY, load
from common.distributed.worker_group import WorkerGroup
from common.machine import usable_cores
from common.reporting.benchmark_figures import plot_rounds
from common.reporting.timing import interleave, paired_ratio
from common.reporting.turns import Rounds, cells, ratios, run_benchmark, table, write_report
from ddp.ladder.ours import OurTraining
from ddp.ladder.rungs import BATCH_SIZE, FIRST, RANKS, Rung, RungTraining, Training, Turn, one_by_one, rungs

TURNS = 4  # of an epoch
PEER = "peer: "  # of the scripts that others write, the fastest is what all are compared with
TUTORIAL = f"{PEER}torch's DDP tutorial"
OURS: dict[str, tuple[type[Training], Any]] = {
    "ddp.train": (OurTraining, {}),
    "ddp.train --fast --precision fp32": (OurTraining, {"fast": True, "precision": "fp32"}),
    "ddp.train --fast": (OurTraining, {"fast": True}),
}
NO_OTHERS: Mapping[str, tuple[type[Training], Any]] = {}


@dataclass(frozen=True)
class LadderConfig:
    """Settings of ``ddp.ladder``."""

    dataset: str = option(None, "default: fashion-mnist where it is found, else glyphs", choices=IN_MEMORY)
    epochs: int = option(4, "of each variant", minimum=1)
    train_samples: int | None = option(None, "of an epoch (default: all)", minimum=TURNS * BATCH_SIZE)
    output: Path = option(Path("runs/ladder-ddp"), "folder of the JSON and the figure")

    def __post_init__(self) -> None:
        if self.dataset is None:
            object.__setattr__(self, "dataset", "fashion-mnist" if fashion_mnist.is_found() else "glyphs")


@command
def main() -> None:
    run_benchmark(LadderConfig, "ddp.ladder", __doc__, None, measure, report)


def measure(
    config: LadderConfig, others: Mapping[str, tuple[type[Training], Any]] = NO_OTHERS
) -> tuple[dict[str, list[Turn]], dict[str, float]]:
    """For each variant its turns, means over its ranks; and its accuracy on the test set in the end.

    :param others: more variants, each a service of a rank and its settings
    """
    data = load(config.dataset, train_samples=config.train_samples)
    steps = len(data.train) // BATCH_SIZE // TURNS
    climbed = {**rungs(), TUTORIAL: Rung(one_by_one, ranks=RANKS)}
    variants = {name: (RungTraining, rung) for name, rung in climbed.items()} | OURS | dict(others)
    with Rounds(config.epochs * TURNS + 1) as progress, contextlib.ExitStack() as stack:
        groups = {}
        for name, (service, settings) in variants.items():
            ranks = getattr(settings, "ranks", RANKS)
            group = WorkerGroup(ranks, service, settings, data, threads=max(1, usable_cores() // ranks))
            groups[name] = stack.enter_context(group)

        def turn(name: str) -> Any:
            return Turn(*map(statistics.fmean, zip(*groups[name].call("run", steps), strict=True)))

        turns: Any = {name: functools.partial(turn, name) for name in groups}
        measured: Any = interleave(
            turns, config.epochs * TURNS, after_round=lambda: progress.round_done(f"{len(groups)} variants")
        )
        return measured, {name: group.call("test")[0] for name, group in groups.items()}


def report(config: LadderConfig, measured: tuple[dict[str, list[Turn]], dict[str, float]]) -> str:
    """Write the JSON and the figure, and return the table."""
    turns, accuracy = measured
    rates = {name: [BATCH_SIZE / turn.seconds for turn in own] for name, own in turns.items()}
    climbed = list(rungs())
    gains = {name: paired_ratio(rates[name], rates[before]) for before, name in itertools.pairwise(climbed)}
    medians = {name: Turn(*map(statistics.median, zip(*own, strict=True))) for name, own in turns.items()}
    limits = {
        name: f"{one.loading:.0%} loading, {one.kernel:.0%} kernel, {one.idle:.0%} idle"
        for name, one in medians.items()
    }
    best = max((name for name in rates if name.startswith(PEER)), key=lambda name: statistics.median(rates[name]))
    columns = {
        "images/s [quartiles]": cells(rates, ",.0f"),
        "of the rung before": {name: format(gain, ".2f") for name, gain in gains.items()},
        f"of {best.removeprefix(PEER)}'s": cells(ratios(rates, best), ".2f"),
        "limited by": limits,
        "accuracy": {name: f"{100 * share:.1f} %" for name, share in accuracy.items()},
    }
    whole, product = paired_ratio(rates[climbed[-1]], rates[FIRST]), math.prod(gain.median for gain in gains.values())
    title = f"{config.dataset}, batches of {BATCH_SIZE}, {usable_cores()} cores"
    lines = [
        title,
        *table(columns, 36, 37),
        f"the last rung by the first: {whole:.2f}; the product of the gains: {product:.2f}",
    ]
    shown = {f"{name}\n{limits[name]}": own for name, own in rates.items()}
    plot_rounds(
        config.output / "ladder.png",
        {"": shown},
        title=f"one change at a time: {title}",
        x_title="images/s",
        spec=",.0f",
    )
    content = {"turns": {name: [turn._asdict() for turn in own] for name, own in turns.items()}, "accuracy": accuracy}
    return write_report(config, "ladder", content, ["ladder"], lines)


if __name__ == "__main__":
    main()
