"""The cost of loading on this machine, stage by stage, and the setting to use.

    python -m dataloading.bench --workers 4
    python -m dataloading.bench --workers 0,2,4 --loader stock,fast --augmentation none,affine
    python -m dataloading.bench --path-to-folder ~/photos --image-size 224 --step-ms 180

Each axis takes a list, and all combinations are tried. A round runs every setting once, so that a slow moment of the machine
affects all settings. The start of the workers is timed apart from the steady run. Without a folder, the benchmark uses drawn
faces, which cost as much as those of Labeled Faces in the Wild.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.cli import command, option
from common.data import DECODERS
from common.data.loaders import loader_errors
from common.errors import UsageError
from common.machine import usable_cores
from common.reporting.benchmark_figures import plot_sweep
from common.reporting.other_work import OtherWork
from common.reporting.timing import Spread
from common.reporting.turns import Rounds, run_benchmark, write_report
from dataloading.bench.settings import LOADERS, Library, Setting, varying
from dataloading.bench.stages import measure_stages
from dataloading.bench.sweep import LoadingMeasurement, measure, wait_share
from dataloading.bench.verdict import changes, cost, explain, recommend, waiting_for
from dataloading.dataset.augmentation import AUGMENTATIONS
from dataloading.dataset.decoders import get_decoder
from dataloading.loader.fast_loader import choose_pool
from dataloading.synthetic import face_cache

YES_NO = ("yes", "no")


@dataclass(frozen=True)
class LoadingBenchConfig:
    """Settings of ``dataloading.bench``. A field that is a list is an axis of the sweep."""

    path_to_folder: str | None = option(None, "folder or URL of the JPEG files (default: drawn faces)")
    workers: str = option("auto", "4 sweeps 0, 1, 2, 3, 4; a list like 0,4 has exactly those (auto: up to cores + 2)")
    batch_size: tuple[int, ...] = option((32,), "images per batch", minimum=1)
    loader: tuple[str, ...] = option(
        ("stock",),
        "stock: DataLoader; fast: FastLoader with its default pool; fast-threads, fast-processes: with that pool",
        choices=("fast", *LOADERS),
    )
    augmentation: tuple[str, ...] = option(("none",), "augmentation of each image", choices=AUGMENTATIONS)
    decoder: tuple[str, ...] = option(("pillow",), "decoder of the JPEGs", choices=DECODERS)
    prefetch_factor: tuple[int, ...] = option((2,), "batches requested ahead, per worker", minimum=1)
    persistent_workers: tuple[str, ...] = option(("no",), "keep workers from one repeat to the next", choices=YES_NO)
    latency_ms: tuple[float, ...] = option((0.0,), "median delay added to each file", minimum=0)
    fetch_threads: tuple[int, ...] = option((1,), "files that each worker fetches in parallel", minimum=1)
    image_size: int | None = option(None, "resize every image to a square of this many pixels", minimum=1, maximum=4096)
    repeats: int = option(5, "rounds that count", minimum=2)
    batches: int = option(100, "batches of each run", minimum=1)
    step_ms: float | None = option(
        None,
        "length of a training step, to measure whether it waits for data (a step on the CPU may wait longer)",
        above=0,
    )
    output: Path = option(Path("runs/bench-loading"), "folder of the JSON and the PNG")

    def __post_init__(self) -> None:
        self.worker_counts()
        for name in self.decoder:
            get_decoder(name)
        if self.step_ms is not None and len(self.batch_size) > 1:
            raise UsageError(
                f"--step-ms {self.step_ms} is the step of one --batch-size, and {self.batch_size} are several"
            )

    def worker_counts(self) -> list[int]:
        """The numbers of workers that ``--workers`` selects.

        :raises UsageError: for a value that is no number and no list
        """
        if self.workers == "auto":
            most = usable_cores() + 2
            return [n for n in range(most + 1) if n <= 4 or n == most or n & (n - 1) == 0]
        parts = self.workers.split(",")
        try:
            counts = [int(part) for part in parts if part.strip()]
        except ValueError:
            counts = []
        if not counts or min(counts) < 0:
            raise UsageError(f"--workers {self.workers} is no number, and no list of numbers, of 0 or more")
        return list(dict.fromkeys(counts)) if len(parts) > 1 else list(range(counts[0] + 1))

    def settings(self) -> list[Setting]:
        """All combinations of the axes, without equivalent ones."""
        axes: dict[str, Any] = {"loader": self.loader, "workers": self.worker_counts()}
        for field in dataclasses.fields(Setting):
            if field.name not in axes:
                values = getattr(self, field.name)
                axes[field.name] = [value == "yes" for value in values] if field.type == "bool" else values
        combinations = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
        return list(dict.fromkeys(self._setting(combination).canonical() for combination in combinations))

    def _setting(self, combination: dict[str, Any]) -> Setting:
        """One combination, with the worker pool that ``--loader fast`` chooses."""
        if combination["loader"] == "fast":
            per_image = combination["augmentation"] != "none" or self.image_size is not None
            pool = "threads" if combination["fetch_threads"] > 1 else choose_pool(per_image)
            combination["loader"] = f"fast-{pool}"
        return Setting(**combination)


@command
def main() -> None:
    run_benchmark(
        LoadingBenchConfig, "dataloading.bench", __doc__, None, run, lambda config, measured: report(config, *measured)
    )


def run(config: LoadingBenchConfig) -> tuple[list[LoadingMeasurement], list[LoadingVerdict]]:
    """Measure all settings and judge them, unless other programs used the cores; returns what :func:`report` takes."""
    with loader_errors(), contextlib.ExitStack() as stack:
        library = Library(config.path_to_folder or os.fspath(face_cache.ensure()), config.image_size)
        settings = config.settings()
        subjects = {(setting.augmentation, setting.latency_ms) for setting in settings}
        progress = stack.enter_context(Rounds((1 + len(subjects)) * (config.repeats + 1)))

        def measure_all(settings: list[Setting]) -> list[LoadingMeasurement]:
            return measure(
                library,
                settings,
                batches=config.batches,
                repeats=config.repeats,
                after_round=lambda: progress.round_done(f"{len(settings)} settings each"),
            )

        others = OtherWork()
        sweep = measure_all(settings)
        verdicts = (
            []
            if others.doubt()
            else [judge(config, library, task, measure_all) for task in progress.until_stopped(tasks(sweep))]
        )
        return sweep, [] if others.doubt() else verdicts


def tasks(sweep: list[LoadingMeasurement]) -> list[list[LoadingMeasurement]]:
    """Group the settings that do the same work: a benchmark cannot choose the augmentation or the storage's latency."""
    parts: dict[tuple[str, float], list[LoadingMeasurement]] = {}
    for measured in sweep:
        parts.setdefault((measured.setting.augmentation, measured.setting.latency_ms), []).append(measured)
    return list(parts.values())


@dataclass(frozen=True)
class LoadingVerdict:
    """The result for the settings of one task.

    :param recommended: the setting to use
    :param explained: the setting of the stage costs: the best one with workers, if any, since those need an explanation
        where the main process alone is faster
    :param stage_costs: seconds per image of each stage
    :param tried: the changes of that setting that were measured in turns with it
    :param lines: the verdict in words
    """

    recommended: Setting
    explained: Setting
    stage_costs: dict[str, float]
    tried: list[LoadingMeasurement]
    lines: list[str]


def judge(
    config: LoadingBenchConfig,
    library: Library,
    task: list[LoadingMeasurement],
    measure_all: Callable[[list[Setting]], list[LoadingMeasurement]],
) -> LoadingVerdict:
    """Choose a setting, and measure its stages, its changes, and how long a training step waits for it."""
    axes = varying([measured.setting for measured in task])
    chosen, *equals = recommend(task)
    with_workers, *_ = recommend([measured for measured in task if measured.setting.workers] or task)
    dataset = library.dataset(with_workers.setting)
    costs = measure_stages(dataset, with_workers.setting)
    lines = [f"best setting: {chosen.setting.label(axes)}, {chosen.images_per_s:,.0f} images/s"]
    if equals:
        lines.append(f"as fast, within noise, and no cheaper: {'; '.join(one.setting.label(axes) for one in equals)}")
    if chosen.setting.workers == 0 < with_workers.setting.workers:
        lines.append(
            "but in training, the main process loads only while it does not train; with workers, the best is "
            f"{with_workers.setting.label(axes)}, {with_workers.images_per_s:,.0f} images/s"
        )
    settings = changes(with_workers.setting, usable_cores(), library.image_size is not None)
    now, *tried = measure_all([with_workers.setting, *settings])
    lines += explain(now, tried, len(dataset))
    if config.step_ms is not None:
        step_s = config.step_ms / 1000
        settings = [one.setting for one in sorted(task, key=cost)]
        shares = {setting: wait_share(library, setting, step_s, config.batches) for setting in settings}
        lines.append(waiting_for(config.step_ms, shares, axes))
    return LoadingVerdict(chosen.setting, with_workers.setting, costs, tried, lines)


def report(config: LoadingBenchConfig, sweep: list[LoadingMeasurement], verdicts: list[LoadingVerdict]) -> str:
    """Write the JSON and the PNG.

    :returns: the tables and the verdicts for the terminal
    """
    axes = varying([measured.setting for measured in sweep])
    content = {
        "settings": [{**dataclasses.asdict(m), "images_per_s": m.images_per_s} for m in sweep],
        "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts],
    }
    title = f"{config.path_to_folder or face_cache.TITLE}, {config.repeats} runs of {config.batches} batches each"
    x_title, x_values, curves = _curves(sweep, axes)
    plot_sweep(config.output / "sweep.png", x_title, x_values, {"": curves}, title=title)
    lines = _table(sweep, axes, config.batches)
    for verdict in verdicts:
        lines += ["", f"an image costs one worker, with {verdict.explained.label(axes)}:"]
        lines += [*_stage_table(verdict.stage_costs), "", *verdict.lines]
    if torch.cuda.is_available():
        lines.append("(every batch was copied to the GPU, which the stages of an image do not show)")
    lines.append("(files read before come from the page cache; a cold folder, or one larger than memory, takes longer)")
    return write_report(config, "sweep", content, ["sweep"], lines)


def _curves(
    sweep: list[LoadingMeasurement], axes: list[str]
) -> tuple[str, list[Any], dict[str, dict[int, list[float]]]]:
    """The sweep as curves: the x axis (the workers, if they vary), its values, and a curve for each combination of the others.

    A curve maps a position on the x axis to the images/s of each run.
    """
    x_axis = axes[0] if axes and "workers" not in axes else "workers"
    others = [axis for axis in axes if axis != x_axis]
    values = sorted({getattr(measured.setting, x_axis) for measured in sweep})
    curves: dict[str, dict[int, list[float]]] = {}
    for measured in sweep:
        position = values.index(getattr(measured.setting, x_axis))
        curves.setdefault(measured.setting.label(others), {})[position] = [
            measured.images / seconds for seconds in measured.steady
        ]
    return x_axis.replace("_", " "), values, curves


def _table(sweep: list[LoadingMeasurement], axes: list[str], batches: int) -> list[str]:
    width = max(len(measured.setting.label(axes)) for measured in sweep)
    heading = f"{'':>{width}}   first batch   {batches:5} more batches [quartiles]   images/s"
    return [
        heading,
        *(
            f"{measured.setting.label(axes):>{width}}   {statistics.median(measured.first_batch):9.3f} s   "
            f"{Spread.of(measured.steady):9.3f} s   {measured.images_per_s:9,.0f}"
            for measured in sweep
        ),
    ]


def _stage_table(costs: dict[str, float]) -> list[str]:
    total = sum(costs.values())
    lines = [f"{name:>12}: {1e6 * each:7.0f} µs  {100 * each / total:3.0f} %" for name, each in costs.items()]
    return [*lines, f"{'together':>12}: {1e6 * total:7.0f} µs"]


if __name__ == "__main__":
    main()
