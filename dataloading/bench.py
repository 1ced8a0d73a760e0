"""What loading costs on this machine, where the time goes, and which setting to use.

    python -m dataloading.bench --workers 4
    python -m dataloading.bench --workers 0,2,4 --loader stock,fast --augmentation none,affine
    python -m dataloading.bench --path-to-folder ~/photos --image-size 224 --model resnet18

Each axis takes a list, and all combinations are tried. A round runs every setting once, so that all meet the same weather;
the start of the workers is timed apart from the steady run. Without a folder, drawn faces are used that cost what those of
Labeled Faces in the Wild do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.cli import UsageError, command, option, parse
from common.machine import describe_machine, usable_cores
from common.models import MODELS
from common.plotting import plot_sweep
from common.process_group import find_place
from common.rank_logging import Progress, rank_logging
from common.run_directory import write_json
from dataloading import face_cache
from dataloading.augmentation import AUGMENTATIONS
from dataloading.decoders import DECODERS, get_decoder
from dataloading.failures import explained
from dataloading.http_server import serve
from dataloading.lfw_dataset import ON_ERROR, SKIP_LIMIT
from dataloading.settings import LOADERS, Library, Setting
from dataloading.stages import StageCosts, measure_stages
from dataloading.step_time import measure_step
from dataloading.storage import HttpFolder, open_storage
from dataloading.sweep import Measured, measure, median_memory
from dataloading.verdict import confidence, explain, recommend, waiting_for

YES_NO = ("yes", "no")
STORAGES = ("files", "http")


@dataclass(frozen=True)
class BenchConfig:
    """Settings of ``dataloading.bench``. A field that is a list is an axis of the sweep."""

    path_to_folder: str | None = option(None, "folder or URL of the JPEG files (default: drawn faces)")
    workers: str = option("auto", "4 sweeps 0, 1, 2, 3, 4; a list like 0,4 has exactly those (auto: up to cores + 2)")
    batch_size: tuple[int, ...] = option((32,), "images per batch", minimum=1)
    loader: tuple[str, ...] = option(("stock",), "torch's DataLoader, or the fast one", choices=LOADERS)
    augmentation: tuple[str, ...] = option(("none",), "of each image", choices=AUGMENTATIONS)
    decoder: tuple[str, ...] = option(("pillow",), "what decodes the JPEGs", choices=DECODERS)
    prefetch_factor: tuple[int, ...] = option((2,), "batches on their way per worker", minimum=1)
    persistent_workers: tuple[str, ...] = option(("no",), "keep workers from one repeat to the next", choices=YES_NO)
    start_method: tuple[str, ...] = option(
        (multiprocessing.get_start_method(),), "how workers start", choices=("fork", "spawn", "forkserver")
    )
    in_order: tuple[str, ...] = option(("yes",), "whether batches wait for those before them", choices=YES_NO)
    pin_memory: tuple[str, ...] = option(("no",), "page-locked batches, copied to the GPU", choices=YES_NO)
    latency_ms: tuple[float, ...] = option((0.0,), "median wait injected into each open", minimum=0)
    fetch_threads: tuple[int, ...] = option((1,), "files that each worker fetches at a time", minimum=1)
    storage: str = option("files", "http serves the folder from a server on this machine", choices=STORAGES)
    image_size: int | None = option(None, "make every image a square of so many pixels", minimum=1)
    on_error: str = option("raise", f"skip leaves out up to {SKIP_LIMIT} files that cannot be read", choices=ON_ERROR)
    repeats: int = option(5, "rounds that count", minimum=2)
    batches: int = option(100, "batches of each run", minimum=1)
    step_ms: float | None = option(None, "a training step's length, to say whether it would wait", above=0)
    model: str | None = option(None, "measure a training step of this model instead", choices=MODELS)
    seed: int = option(0, "of the order and the augmentation", minimum=0)
    output: Path = option(Path("runs/bench-loading"), "folder of the JSON and the PNG")

    def __post_init__(self) -> None:
        self.worker_counts()
        for name in self.decoder:
            get_decoder(name)
        for method in self.start_method:
            if method not in multiprocessing.get_all_start_methods():
                raise UsageError(f"--start-method {method} is not there on this system: use {_methods()}")
        if "yes" in self.pin_memory and not torch.cuda.is_available():
            raise UsageError("--pin-memory yes needs a GPU to copy to, and there is none here: leave it out")
        if self.step_ms is not None and self.model is not None:
            raise UsageError(f"--step-ms {self.step_ms} and --model {self.model} both say how long a step is: give one")
        if self.storage == "http" and "://" in (self.path_to_folder or ""):
            raise UsageError(f"--storage http serves a local folder, not {self.path_to_folder}: give one of the two")

    def worker_counts(self) -> list[int]:
        """What ``--workers`` means.

        :raises UsageError: when it means nothing
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
        """All combinations of the axes; those that mean the same once."""
        axes: dict[str, Any] = {"loader": self.loader, "workers": self.worker_counts()}
        for field in dataclasses.fields(Setting):
            if field.name not in axes:
                values = getattr(self, field.name)
                axes[field.name] = [value == "yes" for value in values] if field.type == "bool" else values
        combinations = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
        return list(dict.fromkeys(Setting(**combination).canonical() for combination in combinations))


def _methods() -> str:
    return " or ".join(multiprocessing.get_all_start_methods())


@command
def main() -> None:
    config = parse(BenchConfig, "dataloading.bench", __doc__)
    place = find_place({}, backend="gloo")  # the only process; what it computes, it computes where ddp.train would
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    with rank_logging(place), explained(), contextlib.ExitStack() as stack:
        try:
            config.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--output {config.output} cannot be written: {error.strerror}") from error
        library = _library(config, stack)
        progress = stack.enter_context(Progress(place, "bench", config.repeats + 1))
        sweep = measure(
            library,
            config.settings(),
            batches=config.batches,
            repeats=config.repeats,
            device=device,
            after_round=lambda done: progress.advance(1, f"{len(config.settings())} settings each"),
        )
        explained_setting = to_explain(sweep).setting
        dataset = library.dataset(explained_setting)
        costs = measure_stages(dataset, explained_setting)
        step_s = config.step_ms / 1000 if config.step_ms is not None else None
        if config.model is not None:
            step_s = measure_step(config.model, explained_setting.batch_size, dataset.image_shape(), device)
        print(report(config, library, sweep, costs, step_s))


def _library(config: BenchConfig, stack: contextlib.ExitStack) -> Library:
    """The folder to read from; for ``--storage http``, a server per latency, which ends with the stack."""
    root = config.path_to_folder or os.fspath(face_cache.ensure())
    given = {"image_size": config.image_size, "on_error": config.on_error, "seed": config.seed}
    if config.storage == "files":
        return Library.of(root, **given)  # type: ignore[arg-type]
    open_storage(root)  # a folder that is not there is better missed before a server is
    serving = lambda latency_ms: HttpFolder(stack.enter_context(serve(root, latency_ms, config.seed)))  # noqa: E731
    return Library(serving, **given)  # type: ignore[arg-type]


def to_explain(sweep: list[Measured]) -> Measured:
    """The best setting with workers, if there is one: where the main process alone is faster, they are what is puzzling."""
    return recommend([measured for measured in sweep if measured.setting.workers] or sweep).chosen


def report(
    config: BenchConfig, library: Library, sweep: list[Measured], costs: StageCosts, step_s: float | None
) -> str:
    """Write the JSON and the PNG, and say what they say."""
    axes = varying([measured.setting for measured in sweep])
    recommendation = recommend(sweep)
    chosen = recommendation.chosen
    explained = to_explain(sweep)
    verdict = [
        f"best setting: {chosen.setting.label(axes)}, {chosen.images_per_s:,.0f} images/s "
        f"({confidence(recommendation, axes)})"
    ]
    if chosen.setting.workers == 0 < explained.setting.workers:
        verdict.append(
            "but in training, the main process loads only while nothing computes; with workers, the best is "
            f"{explained.setting.label(axes)}, {explained.images_per_s:,.0f} images/s"
        )
    verdict.append(explain(explained, costs, len(library.dataset(explained.setting)), usable_cores()))
    if step_s is not None:
        verdict.append(waiting_for(sweep, step_s, axes))
        if not torch.cuda.is_available():
            verdict.append("(without a GPU, the step and the loading compete for the same cores: expect more waiting)")
    if library.skipped:
        verdict.append(f"{library.skipped} times, a file that could not be read was skipped")
    write_json(
        config.output / "sweep.json",
        {
            "machine": describe_machine(),
            "config": dataclasses.asdict(config),
            "settings": [
                {
                    **dataclasses.asdict(measured),
                    "images_per_s": measured.images_per_s,
                    "ratio_to_best": dataclasses.asdict(ratio),
                }
                for measured, ratio in zip(sweep, recommendation.ratios, strict=True)
            ],
            "stage_costs": dataclasses.asdict(costs),
            "step_s": step_s,
            "recommended": dataclasses.asdict(chosen.setting),
            "verdict": verdict,
        },
    )
    title = f"{config.path_to_folder or face_cache.TITLE}, {config.repeats} runs of {config.batches} batches each"
    plot_sweep(config.output / "sweep.png", *_curves(sweep, axes), cores=usable_cores(), title=title)
    return "\n".join(
        [
            *_table(sweep, axes),
            "",
            f"an image costs one worker, with {explained.setting.label(axes)}:",
            *_stage_table(costs),
            "",
            *verdict,
            f"results in {config.output}: sweep.png, sweep.json",
        ]
    )


def varying(settings: list[Setting]) -> list[str]:
    """The axes along which the settings differ."""
    names = [field.name for field in dataclasses.fields(Setting)]
    return [name for name in names if len({getattr(setting, name) for setting in settings}) > 1]


def _curves(
    sweep: list[Measured], axes: list[str]
) -> tuple[str, list[Any], dict[str, dict[int, tuple[list[float], int]]]]:
    """The sweep as a figure's curves: the x axis (the workers, where they vary), its values, and for each combination of the
    others, by position, the seconds of each run and its images."""
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


def _table(sweep: list[Measured], axes: list[str]) -> list[str]:
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
