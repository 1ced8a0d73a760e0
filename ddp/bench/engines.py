"""The hand-written DDP against torch's, by the time of a training step (``python -m ddp.bench engines``).

Every DDP variant trains its own copy of one model on one batch that is already in memory: forward, backward with the
gradients averaged, optimizer step. All variants live in the same processes and take turns. A turn begins with a barrier; its
time is that of the slowest rank, per step. The processor time of all threads of a rank, Python's and gloo's included, does
not show waiting, but it separates the variants even on a machine that others use. One variant does not synchronize at all:
no DDP can be faster.

By default there is a rank for each GPU, over NCCL; with one GPU, one rank, whose time is what a wrapper costs without any
communication. Without a GPU there are two ranks over gloo, with a thread each. ``--device cuda`` with more ranks than GPUs lets
ranks share a GPU, over gloo, which copies through the host: a functional test more than a measurement.

malloc is told to keep freed memory. By default it returns freed gradients to the kernel, or keeps them, depending on where
they happen to lie. To get them back takes up to a third of a step, and no variant can influence that.

The variants are compared on a convolutional net, a ResNet-18, a wide MLP with large gradients and a deep MLP with many small
ones. The reference is the faster of torch's two modes there (gradients copied out of the buckets, or views into them).
A figure of their own has the three steps of the climb by hand: an all-reduce per parameter, buckets, overlap with backward.
On the CPU, another one has the parts of what each DDP costs (ddp/bench/costs.py).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from common.benchmarking.figures import plot_rounds
from common.benchmarking.turns import cells, progress_of, ratios, table, write_report
from common.command_line.cli import option
from ddp.bench.comparison import Comparison, TurnsConfig, compare
from ddp.bench.costs import PARTIAL, report_costs
from ddp.bench.placement import PlacedConfig
from ddp.bench.variants import (
    BUCKETED,
    CLIMB,
    DDP_VARIANTS,
    HOOKED,
    LARGE,
    NAIVE,
    NETWORKS,
    ON_THE_CPU,
    PLAIN,
    SAMPLES,
    SHARED,
    VIEWS,
    build_network,
)


@dataclass(frozen=True)
class Config(PlacedConfig, TurnsConfig):
    """Settings of ``ddp.bench engines``."""

    models: tuple[str, ...] = option(
        None,
        f"models on which the DDP variants are compared (default: all; on the CPU not {', '.join(LARGE)})",
        choices=NETWORKS,
    )
    output: Path = option(Path("runs/bench-engines"), "folder of the JSON and the figures")

    def __post_init__(self) -> None:
        super().__post_init__()
        models = ON_THE_CPU if self.device == "cpu" else NETWORKS
        object.__setattr__(self, "models", self.models or models)


def measure(config: Config) -> list[Comparison]:
    """Measure the variants on each model."""
    # On a GPU only the backend can sum, and a rank's processor time is that of queueing.
    variants = {**DDP_VARIANTS, **PARTIAL} if config.device == "cpu" else {**DDP_VARIANTS}
    if config.device != "cpu":
        del variants[SHARED], variants[HOOKED]
    with progress_of(config, len(config.models)) as progress:
        steps = {m: {name: functools.partial(one.step, m) for name, one in variants.items()} for m in config.models}
        of_models = progress.until_stopped(steps.items())
        return [compare(config, model, own, [PLAIN, VIEWS], progress) for model, own in of_models]


def report(config: Config, compared: list[Comparison]) -> str:
    """Write the JSON and the figures, and return the summary to print."""
    title = f"{config.placement}; {config.builds} x {config.rounds} rounds"
    # The two lower steps of the climb have a picture of their own: next to them, the others would all look alike.
    real = {name: name for name in compared[0].seconds if name not in (NAIVE, BUCKETED, *PARTIAL)}
    _plot(config.output / "engines.png", compared, f"DDP by hand against torch's: {title}", real)
    _plot(config.output / "climb.png", compared, f"the climb, by hand: {title}", CLIMB, scale="log")
    figures = ["engines", "climb"]
    lines = [f"{title}, median [quartiles]"]
    for one in compared:
        lines += [f"{_described(one.title)}, {SAMPLES[one.title]} samples per rank", *_table(one)]
    if config.device == "cpu":
        lines += report_costs(config.output / "costs.png", compared, title)
        figures.append("costs")
    return write_report(config, "engines", {"models": list(map(asdict, compared))}, figures, lines)


def _described(model: str) -> str:
    parameters = list(build_network(model).parameters())
    megabytes = sum(parameter.nbytes for parameter in parameters) / 1e6
    return f"{model}, {len(parameters)} parameters of {megabytes:.1f} MB together"


def _table(one: Comparison) -> list[str]:
    columns = {"ms per step": cells(one.seconds, ".2f", 1e3)}
    columns[f"of {one.reference}'s"] = cells(ratios(one.seconds, one.reference), ".3f")
    columns["of its processor's"] = cells(ratios(one.processor_seconds, one.reference), ".3f")
    return table(columns)


def _plot(
    path: Path, comparisons: list[Comparison], title: str, labels: Mapping[str, str], scale: str = "from zero"
) -> None:
    """:param labels: of the variants to draw"""
    panels = {}
    for one in comparisons:
        of_reference = ratios(one.seconds, one.reference)
        panels[f"{one.title}\n1 = {one.reference}"] = {label: of_reference[name] for name, label in labels.items()}
    plot_rounds(
        path, panels, title=title, x_title="time per step, as a multiple of the variant named above", scale=scale
    )
