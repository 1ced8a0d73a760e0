"""The cost of loading on this machine, stage by stage, and the setting to use.

    python -m dataloading.bench --workers 0,1,2,3,4
    python -m dataloading.bench --workers 0,2,4 --loader stock,fast --batch-size 32,64
    python -m dataloading.bench --path-to-folder ~/photos --image-size 224
    python -m dataloading.bench --start-method fork,forkserver,spawn,threads

Each axis takes a list, and all combinations are tried. A round runs every setting once, so that a slow moment of the machine
affects all settings. The start of the workers is timed apart from the steady run. Without a folder, the benchmark uses drawn
faces, which cost as much as those of Labeled Faces in the Wild.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.benchmarking.figures import plot_sweep
from common.benchmarking.other_work import OtherWork
from common.benchmarking.timing import Spread
from common.benchmarking.turns import Rounds, run_benchmark, table, write_report
from common.command_line.cli import command, flag_of, option
from common.data import DECODERS
from common.data.loaders import loader_errors
from common.errors import UsageError
from common.machine import usable_cores
from dataloading.bench import start_methods
from dataloading.bench.settings import LOADERS, Library, Setting, varying
from dataloading.bench.stages import measure_stages
from dataloading.bench.start_once import METHODS
from dataloading.bench.sweep import LoadingMeasurement, measure
from dataloading.bench.verdict import changes, explain, recommend
from dataloading.dataset.augmentation import AUGMENTATIONS
from dataloading.dataset.decoders import get_decoder
from dataloading.loader.stock_loader import worker_numbers
from dataloading.synthetic import face_cache

FOR_START_METHODS = ("start_method", "path_to_folder", "workers", "repeats", "output")


@dataclass(frozen=True)
class LoadingBenchConfig:
    """Settings of ``dataloading.bench``. A field that is a list is an axis of the sweep."""

    path_to_folder: str | None = option(None, "folder of the JPEG files (default: drawn faces)")
    workers: tuple[int, ...] | None = option(
        None, "processes or threads (default: up to the cores and 2 more)", minimum=0
    )
    batch_size: tuple[int, ...] = option((32,), "images per batch", minimum=1)
    loader: tuple[str, ...] = option(("stock",), "stock: DataLoader; fast: FastLoader", choices=LOADERS)
    augmentation: str = option("none", "augmentation of each image", choices=AUGMENTATIONS)
    decoder: tuple[str, ...] = option(("pillow",), "decoder of the JPEGs", choices=DECODERS)
    prefetch_factor: tuple[int, ...] = option((2,), "batches requested ahead, per worker", minimum=1)
    latency_ms: float = option(0.0, "median delay added to each file", minimum=0)
    fetch_threads: tuple[int, ...] = option((1,), "files that each worker fetches in parallel", minimum=1)
    image_size: int | None = option(None, "resize every image to a square of this many pixels", minimum=1, maximum=4096)
    repeats: int = option(5, "rounds that count", minimum=2)
    batches: int = option(100, "batches of each run", minimum=1)
    start_method: tuple[str, ...] = option((), "measure these ways to start workers, and no sweep", choices=METHODS)
    output: Path = option(Path("runs/bench-loading"), "folder of the JSON and the PNG")

    def __post_init__(self) -> None:
        for name in self.decoder:
            get_decoder(name)
        for field in dataclasses.fields(self) if self.start_method else ():
            if field.name not in FOR_START_METHODS and getattr(self, field.name) != field.default:
                raise UsageError(f"{flag_of(field.name)} has no meaning with --start-method: leave it out")
        if self.start_method and self.workers and (len(self.workers) > 1 or not self.workers[0]):
            shown = ",".join(map(str, self.workers))
            raise UsageError(f"--workers {shown}: --start-method takes one number, which is at least 1")

    def settings(self) -> list[Setting]:
        """All combinations of the axes, without equivalent ones."""
        axes: dict[str, Sequence[Any]] = {
            "loader": self.loader,
            "workers": self.workers or worker_numbers(usable_cores() + 2, every_to=4),
            "batch_size": self.batch_size,
            "prefetch_factor": self.prefetch_factor,
            "decoder": self.decoder,
            "fetch_threads": self.fetch_threads,
        }
        task = Setting(augmentation=self.augmentation, latency_ms=self.latency_ms)
        combinations = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
        return list(dict.fromkeys(dataclasses.replace(task, **one).canonical() for one in combinations))


@command
def main() -> None:
    run_benchmark(LoadingBenchConfig, "dataloading.bench", __doc__, None, run, report)


def run(config: LoadingBenchConfig) -> Any:
    """Measure the start methods; or all settings, and judge them. After Ctrl-C there is no verdict."""
    if config.start_method:
        workers = config.workers[0] if config.workers else usable_cores()
        return start_methods.measure(config.start_method, workers, config.repeats, _folder(config))
    with loader_errors(), Rounds(2 * (config.repeats + 1)) as progress:
        library = Library(_folder(config), config.image_size)

        def measure_all(settings: list[Setting]) -> list[LoadingMeasurement]:
            return measure(
                library,
                settings,
                batches=config.batches,
                repeats=config.repeats,
                after_round=lambda: progress.round_done(f"{len(settings)} settings each"),
            )

        others = OtherWork()
        sweep = measure_all(config.settings())
        return sweep, None if Rounds.stopped else judge(library, sweep, measure_all, others)


def _folder(config: LoadingBenchConfig) -> str:
    return config.path_to_folder or os.fspath(face_cache.ensure())


@dataclass(frozen=True)
class LoadingVerdict:
    """The setting to use, and why.

    :param recommended: the setting to use; None if other programs used the cores, so that no verdict is possible
    :param explained: the setting of the stage costs: the best one with workers, if any, since those need an explanation
        where the main process alone is faster
    :param stage_costs: seconds per image of each stage
    :param lines: the verdict in words
    """

    recommended: Setting | None
    explained: Setting
    stage_costs: dict[str, float]
    lines: list[str]


def judge(
    library: Library,
    sweep: list[LoadingMeasurement],
    measure_all: Callable[[list[Setting]], list[LoadingMeasurement]],
    others: OtherWork,
) -> LoadingVerdict:
    """Choose a setting, and measure its stages and its changes.

    :param others: what other programs do since the sweep began. If they disturb it, there are the stages alone
    """
    axes = varying([measured.setting for measured in sweep])
    chosen = recommend(sweep)
    with_workers = recommend([measured for measured in sweep if measured.setting.workers] or sweep)
    dataset = library.dataset(with_workers.setting)
    costs = measure_stages(dataset, with_workers.setting)
    lines = [f"best setting: {chosen.setting.label(axes)}, {chosen.images_per_s:,.0f} images/s"]
    if chosen.setting.workers == 0 < with_workers.setting.workers:
        lines.append(
            "but in training, the main process loads only while it does not train; with workers, the best is "
            f"{with_workers.setting.label(axes)}, {with_workers.images_per_s:,.0f} images/s"
        )
    if not (doubt := others.doubt()):
        now, *tried = measure_all([with_workers.setting, *changes(with_workers.setting, usable_cores())])
        lines += explain(now, tried, len(dataset))
        doubt = others.doubt()
    if doubt:
        return LoadingVerdict(None, with_workers.setting, costs, [f"no verdict: {doubt}"])
    return LoadingVerdict(chosen.setting, with_workers.setting, costs, lines)


def report(config: LoadingBenchConfig, measured: Any) -> str:
    """Write the JSON and the PNG.

    :param measured: what :func:`run` returned
    :returns: the tables and the verdicts for the terminal
    """
    if config.start_method:
        return start_methods.report(config, measured)
    sweep: list[LoadingMeasurement]
    verdict: LoadingVerdict | None
    sweep, verdict = measured
    axes = varying([measured.setting for measured in sweep])
    content = {
        "settings": [{**dataclasses.asdict(m), "images_per_s": m.images_per_s} for m in sweep],
        "verdict": verdict and dataclasses.asdict(verdict),
    }
    source = config.path_to_folder or face_cache.TITLE
    title = f"{source}, {config.repeats} runs of {config.batches} batches each"
    x_title, x_values, curves = _curves(sweep, axes)
    plot_sweep(config.output / "sweep.png", x_title, x_values, {"": curves}, title=title)
    names = [measured.setting.label(axes) for measured in sweep]
    columns = {
        "first batch, s": [f"{statistics.median(measured.first_batch):.3f}" for measured in sweep],
        f"{config.batches} more batches, s [quartiles]": [f"{Spread.of(measured.steady):.3f}" for measured in sweep],
        "images/s": [f"{measured.images_per_s:,.0f}" for measured in sweep],
    }
    lines = table({title: dict(zip(names, cells, strict=True)) for title, cells in columns.items()})
    if verdict:
        lines += ["", f"an image costs one worker, with {verdict.explained.label(axes)}:"]
        lines += [*_stage_table(verdict.stage_costs), "", *verdict.lines]
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


def _stage_table(costs: dict[str, float]) -> list[str]:
    total = sum(costs.values())
    lines = [f"{name:>12}: {1e6 * each:7.0f} µs  {100 * each / total:3.0f} %" for name, each in costs.items()]
    return [*lines, f"{'together':>12}: {1e6 * total:7.0f} µs"]


if __name__ == "__main__":
    main()
