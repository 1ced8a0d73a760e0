"""The cost of loading on this machine, stage by stage, and the setting to use.

    python -m dataloading.bench --workers 4
    python -m dataloading.bench --workers 0,2,4 --loader stock,fast --augmentation none,affine
    python -m dataloading.bench --path-to-folder ~/photos --image-size 224 --model resnet18

Each axis takes a list, and all combinations are tried. A round runs every setting once, so that a slow moment of the machine
affects all settings. The start of the workers is timed apart from the steady run. Without a folder, the benchmark uses drawn
faces, which cost as much as those of Labeled Faces in the Wild.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.cli import command, option, parse
from common.cores import usable_cores
from common.data.loaders import loader_errors
from common.distributed.process_group import DistEnv
from common.distributed.rank_logging import Progress
from common.errors import UsageError
from common.files.run_directory import files_line
from common.reporting.benchmark import CPU, run_alone, write_results
from common.reporting.benchmark_figures import plot_sweep
from common.training.models import LEAST_SAMPLES, MODELS
from dataloading.bench.settings import LOADERS, Library, Setting, with_latency
from dataloading.bench.stages import StageCosts, measure_stages
from dataloading.bench.step_time import measure_step
from dataloading.bench.sweep import LoadingMeasurement, measure, median_memory
from dataloading.bench.verdict import Recommendation, confidence, explain, recommend, waiting_for
from dataloading.dataset.augmentation import AUGMENTATIONS
from dataloading.dataset.decoders import DECODERS, get_decoder
from dataloading.dataset.lfw import ON_ERROR, SKIP_LIMIT
from dataloading.dataset.storage import HttpFolder, Storage
from dataloading.http_server import serve
from dataloading.loader.fast_loader import choose_pool
from dataloading.synthetic import face_cache

START_METHODS = tuple(multiprocessing.get_all_start_methods())  # the system's own first
YES_NO = ("yes", "no")
STORAGES = ("files", "http")


@dataclass(frozen=True)
class LoadingBenchConfig:
    """Settings of ``dataloading.bench``. A field that is a list is an axis of the sweep."""

    path_to_folder: str | None = option(None, "folder or URL of the JPEG files (default: drawn faces)")
    workers: str = option("auto", "4 sweeps 0, 1, 2, 3, 4; a list like 0,4 has exactly those (auto: up to cores + 2)")
    batch_size: tuple[int, ...] = option((32,), "images per batch", minimum=1)
    loader: tuple[str, ...] = option(
        ("stock",),
        "stock: torch's DataLoader; fast: FastLoader with its default pool; fast-threads, fast-processes: with that pool",
        choices=("fast", *LOADERS),
    )
    augmentation: tuple[str, ...] = option(("none",), "augmentation of each image", choices=AUGMENTATIONS)
    decoder: tuple[str, ...] = option(("pillow",), "decoder of the JPEGs", choices=DECODERS)
    prefetch_factor: tuple[int, ...] = option((2,), "batches requested ahead, per worker", minimum=1)
    persistent_workers: tuple[str, ...] = option(("no",), "keep workers from one repeat to the next", choices=YES_NO)
    start_method: tuple[str, ...] = option(
        START_METHODS[:1], "how workers start", choices=("fork", "spawn", "forkserver")
    )
    in_order: tuple[str, ...] = option(("yes",), "whether batches wait for those before them", choices=YES_NO)
    pin_memory: tuple[str, ...] = option(
        ("no",), "page-locked batches, so that the host does not wait while they are copied to the GPU", choices=YES_NO
    )
    latency_ms: tuple[float, ...] = option((0.0,), "median delay added to each open", minimum=0)
    fetch_threads: tuple[int, ...] = option((1,), "files that each worker fetches in parallel", minimum=1)
    storage: str = option("files", "http serves the folder from a server on this machine", choices=STORAGES)
    image_size: int | None = option(None, "resize every image to a square of this many pixels", minimum=1, maximum=4096)
    on_error: str = option("raise", f"skip leaves out up to {SKIP_LIMIT} files that cannot be read", choices=ON_ERROR)
    repeats: int = option(5, "rounds that count", minimum=2)
    batches: int = option(100, "batches of each run", minimum=1)
    step_ms: float | None = option(None, "length of a training step, to predict whether it waits for data", above=0)
    model: str | None = option(None, "measure a training step of this model instead", choices=MODELS)
    seed: int = option(0, "seed of the order and the augmentation", minimum=0)
    output: Path = option(Path("runs/bench-loading"), "folder of the JSON and the PNG")

    def __post_init__(self) -> None:
        self.worker_counts()
        for name in self.decoder:
            get_decoder(name)
        for method in self.start_method:
            if method not in START_METHODS:
                raise UsageError(
                    f"--start-method {method} is not there on this system: use {' or '.join(START_METHODS)}"
                )
        if "yes" in self.pin_memory and not torch.cuda.is_available():
            raise UsageError("--pin-memory yes needs a GPU to copy to, and there is none here: leave it out")
        if self.step_ms is not None and self.model is not None:
            raise UsageError(f"--step-ms {self.step_ms} and --model {self.model} both say how long a step is: give one")
        if self.step_ms is not None and len(self.batch_size) > 1:
            raise UsageError(
                f"--step-ms {self.step_ms} is the step of one --batch-size, and {self.batch_size} are several"
            )
        least = LEAST_SAMPLES.get(self.model or "", 1)
        if min(self.batch_size) < least:
            raise UsageError(
                f"--batch-size {min(self.batch_size)}: {self.model} needs at least {least} images in a batch to normalize them"
            )
        if self.storage == "http" and "://" in (self.path_to_folder or ""):
            raise UsageError(f"--storage http serves a local folder, not {self.path_to_folder}: give one of the two")

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
    config = parse(LoadingBenchConfig, "dataloading.bench", __doc__)
    run_alone("dataloading.bench", config.output, lambda: run(config), lambda taken: report(config, *taken))


def run(config: LoadingBenchConfig) -> tuple[Library, list[LoadingMeasurement], list[LoadingVerdict]]:
    """Measure all settings and judge them; returns what :func:`report` takes."""
    device = torch.device("cuda") if torch.cuda.is_available() else CPU
    with loader_errors(), contextlib.ExitStack() as stack:
        library = _library(config, stack)
        settings = config.settings()
        steps = step_times(config, library.dataset(settings[0]).image_shape(), device)
        progress = stack.enter_context(Progress(DistEnv.alone(CPU), "bench", config.repeats + 1))
        sweep = measure(
            library,
            settings,
            batches=config.batches,
            repeats=config.repeats,
            device=device,
            after_round=lambda done: progress.advance(1, f"{len(settings)} settings each"),
        )
        return library, sweep, [judge(library, task, steps) for task in tasks(sweep)]


def _library(config: LoadingBenchConfig, stack: contextlib.ExitStack) -> Library:
    """The folder to read from. For ``--storage http`` it starts a server per latency, which ends with the stack."""
    root = config.path_to_folder or os.fspath(face_cache.ensure())

    def served(latency_ms: float) -> Storage:
        return HttpFolder(stack.enter_context(serve(root, latency_ms, config.seed)))

    here = with_latency(root, config.seed)  # a missing folder is reported before a server starts
    return Library(
        here if config.storage == "files" else served,
        image_size=config.image_size,
        on_error=config.on_error,
        seed=config.seed,
    )


def tasks(sweep: list[LoadingMeasurement]) -> list[list[LoadingMeasurement]]:
    """Group the settings that do the same work: a benchmark cannot choose the augmentation or the storage's latency."""
    parts: dict[tuple[str, float], list[LoadingMeasurement]] = {}
    for measured in sweep:
        parts.setdefault((measured.setting.augmentation, measured.setting.latency_ms), []).append(measured)
    return list(parts.values())


@dataclass(frozen=True)
class LoadingVerdict:
    """The result for the settings of one task.

    :param recommendation: the setting to use
    :param explained: the setting of the stage costs: the best one with workers, if any, since those need an explanation
        where the main process alone is faster
    :param costs: of each stage
    :param lines: the verdict in words
    """

    recommendation: Recommendation
    explained: LoadingMeasurement
    costs: StageCosts
    lines: list[str]


def step_times(config: LoadingBenchConfig, image_shape: tuple[int, int, int], device: torch.device) -> dict[int, float]:
    """Seconds of a training step for each batch size, as given or measured; empty when not requested."""
    if config.model is not None:
        return {size: measure_step(config.model, size, image_shape, device) for size in config.batch_size}
    return {} if config.step_ms is None else {config.batch_size[0]: config.step_ms / 1000}


def judge(library: Library, task: list[LoadingMeasurement], steps: Mapping[int, float]) -> LoadingVerdict:
    """Choose a setting, and measure its stages to explain its speed.

    :param steps: seconds of a training step by batch size, to predict whether it waits
    """
    axes = varying([measured.setting for measured in task])
    recommendation = recommend(task)
    chosen = recommendation.chosen
    with_workers = recommend([measured for measured in task if measured.setting.workers] or task).chosen
    dataset = library.dataset(with_workers.setting)
    costs = measure_stages(dataset, with_workers.setting)
    lines = [
        f"best setting: {chosen.setting.label(axes)}, {chosen.images_per_s:,.0f} images/s "
        f"({confidence(recommendation, axes)})"
    ]
    if chosen.setting.workers == 0 < with_workers.setting.workers:
        idle = "it queues nothing for the GPU" if torch.cuda.is_available() else "nothing computes"
        lines.append(
            f"but in training, the main process loads only while {idle}; with workers, the best is "
            f"{with_workers.setting.label(axes)}, {with_workers.images_per_s:,.0f} images/s"
        )
    lines.append(explain(with_workers, costs, len(dataset), usable_cores()))
    for batch_size, step_s in steps.items():
        lines.append(waiting_for([m for m in task if m.setting.batch_size == batch_size], step_s, axes))
    if steps and not torch.cuda.is_available():
        lines.append("(without a GPU, the step and the loading compete for the same cores: expect more waiting)")
    return LoadingVerdict(recommendation, with_workers, costs, lines)


def report(
    config: LoadingBenchConfig, library: Library, sweep: list[LoadingMeasurement], verdicts: list[LoadingVerdict]
) -> str:
    """Write the JSON and the PNG.

    :returns: the tables and the verdicts for the terminal
    """
    axes = varying([measured.setting for measured in sweep])
    write_results(
        config.output / "sweep.json",
        {
            "config": dataclasses.asdict(config),
            "settings": [{**dataclasses.asdict(m), "images_per_s": m.images_per_s} for m in sweep],
            "verdicts": [
                {
                    "recommended": dataclasses.asdict(verdict.recommendation.chosen.setting),
                    "explained": dataclasses.asdict(verdict.explained.setting),
                    "stage_costs": dataclasses.asdict(verdict.costs),
                    "lines": verdict.lines,
                }
                for verdict in verdicts
            ],
            "skipped": library.skipped,
        },
    )
    title = f"{config.path_to_folder or face_cache.TITLE}, {config.repeats} runs of {config.batches} batches each"
    plot_sweep(config.output / "sweep.png", *_curves(sweep, axes), cores=usable_cores(), title=title)
    lines = _table(sweep, axes)
    for verdict in verdicts:
        lines += ["", f"an image costs one worker, with {verdict.explained.setting.label(axes)}:"]
        lines += [*_stage_table(verdict.costs), "", *verdict.lines]
    if torch.cuda.is_available():
        lines.append("(every batch was copied to the GPU, which the stages of an image do not show)")
    if library.skipped:
        lines.append(f"files skipped because they cannot be read: {library.skipped}")
    lines.append("(files read before come from the page cache; a cold folder, or one larger than memory, takes longer)")
    return "\n".join([*lines, files_line(config.output, ("sweep.png", "sweep.json"))])


def varying(settings: list[Setting]) -> list[str]:
    """The axes along which the settings differ."""
    names = [field.name for field in dataclasses.fields(Setting)]
    return [name for name in names if len({getattr(setting, name) for setting in settings}) > 1]


def _curves(
    sweep: list[LoadingMeasurement], axes: list[str]
) -> tuple[str, list[Any], dict[str, dict[int, tuple[list[float], int]]]]:
    """The sweep as curves: the x axis (the workers, if they vary), its values, and a curve for each combination of the others.

    A curve maps a position on the x axis to the seconds of each run and the number of images in one.
    """
    numbers = [axis for axis in axes if not isinstance(getattr(sweep[0].setting, axis), str | bool)]
    x_axis = next((axis for axis in ("workers", *numbers) if axis in axes), axes[0] if axes else "workers")
    others = [axis for axis in axes if axis != x_axis]
    values = sorted({getattr(measured.setting, x_axis) for measured in sweep})
    curves: dict[str, dict[int, tuple[list[float], int]]] = {}
    for measured in sweep:
        point = measured.steady, measured.batches * measured.setting.batch_size
        position = values.index(getattr(measured.setting, x_axis))
        curves.setdefault(measured.setting.label(others), {})[position] = point
    return x_axis, values, curves


def _table(sweep: list[LoadingMeasurement], axes: list[str]) -> list[str]:
    width = max(len(measured.setting.label(axes)) for measured in sweep)
    lines = [
        f"{'':>{width}}   first batch   {sweep[0].batches} more batches     images/s   a worker's own memory (with its share)"
    ]
    for measured in sweep:
        memory = median_memory(measured)
        shared = "" if memory is None or memory.proportional is None else f" ({memory.proportional:.0f})"
        megabytes = "" if memory is None else f"{memory.unique:6.0f}{shared} MB"
        lines.append(
            f"{measured.setting.label(axes):>{width}}   {statistics.median(measured.first_batch):9.3f} s   "
            f"{statistics.mean(measured.steady):7.3f} ± {statistics.stdev(measured.steady):5.3f} s   "
            f"{measured.images_per_s:9,.0f}   {megabytes}"
        )
    return lines


def _stage_table(costs: StageCosts) -> list[str]:
    lines = [
        f"{name:>12}: {1e6 * stage.wall:7.0f} µs  {100 * stage.wall / costs.wall:3.0f} %"
        for name, stage in costs.stages.items()
    ]
    lines.append(
        f"{'together':>12}: {1e6 * costs.wall:7.0f} µs, and the main process {1e6 * costs.receiving:.0f} µs to receive it"
    )
    return lines


if __name__ == "__main__":
    main()
