"""From the usual first script to the fastest run, one change at a time.

    python -m ddp.ladder                     # on Fashion-MNIST where it is found, else on drawn glyphs

A rung is the training loop of the one before with one change (ddp/ladder/rungs.py). All train the same network by the same recipe, and
take turns of a quarter of an epoch. In a clone, ``python -m maintain.libraries`` measures ``ddp.train`` and other libraries beside them.
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
from typing import Any, TypeAlias

from common.benchmarking.figures import plot_rounds
from common.benchmarking.timing import interleave, paired_ratio
from common.benchmarking.turns import Rounds, cells, run_benchmark, table, write_report
from common.command_line.cli import command, option
from common.data import fashion_mnist
from common.data.datasets import IN_MEMORY, load
from common.machine import usable_cores
from ddp.ladder.rungs import BATCH_SIZE, FIRST, RANKS, RungTraining, Training, Turn, rungs
from ddp.rendezvous.worker_group import WorkerGroup

TURNS = 4  # of an epoch
Variants: TypeAlias = Mapping[str, tuple[type[Training], Any]]  # each a service of a rank, and its settings


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


def measure(config: LadderConfig, others: Variants | None = None) -> dict[str, list[Turn]]:
    """For each variant its turns, means over its ranks.

    :param others: variants beside the rungs
    """
    data = load(config.dataset, train_samples=config.train_samples)
    steps = len(data.train) // BATCH_SIZE // TURNS
    variants: Variants = {name: (RungTraining, rung) for name, rung in rungs().items()} | dict(others or {})
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
        return dict(measured)


def rates_of(turns: Mapping[str, list[Turn]]) -> dict[str, list[float]]:
    """Images per second of each variant, one entry per turn."""
    return {name: [BATCH_SIZE / turn.seconds for turn in own] for name, own in turns.items()}


def report(
    config: LadderConfig, turns: dict[str, list[Turn]], others: Mapping[str, Mapping[str, str]] | None = None
) -> str:
    """Write the JSON and the figure, and return the table.

    :param others: groups of the variants beside the rungs: for each group's title, the variants' names and labels
    """
    rates = rates_of(turns)
    climbed = list(rungs())
    gains = {name: paired_ratio(rates[name], rates[before]) for before, name in itertools.pairwise(climbed)}
    medians = {name: Turn(*map(statistics.median, zip(*own, strict=True))) for name, own in turns.items()}
    limits = {
        name: f"{one.loading:.0%} loading, {one.kernel:.0%} kernel, {one.idle:.0%} idle"
        for name, one in medians.items()
    }
    columns = {
        "images/s [quartiles]": cells(rates, ",.0f"),
        "of the rung before": {name: format(gain, ".2f") for name, gain in gains.items()},
        "limited by": limits,
    }
    whole, product = paired_ratio(rates[climbed[-1]], rates[FIRST]), math.prod(gain.median for gain in gains.values())
    title = f"{config.dataset}, batches of {BATCH_SIZE}, {usable_cores()} cores"
    lines = [
        title,
        *table(columns, 36, 37),
        f"the last rung by the first: {whole:.2f}; the product of the gains: {product:.2f}",
    ]
    groups = {"the ladder: each rung has one change more": {name: name for name in climbed}, **(others or {})}
    plot_rounds(
        config.output / "ladder.png",
        {
            group: {f"{label}\n{limits[name]}": rates[name] for name, label in labels.items()}
            for group, labels in groups.items()
        },
        title=f"{title}; orange: bf16, blue: fp32",
        x_title="images/s, and shares: waiting for batches, of the time; in the kernel, and idle, of the cores' time",
        spec=",.0f",
        stacked=True,
        kind=lambda label: "bf16" in label,
    )
    content = {"turns": {name: [turn._asdict() for turn in own] for name, own in turns.items()}}
    return write_report(config, "ladder", content, ["ladder"], lines)


if __name__ == "__main__":
    main()
