"""Does data parallelism in one process pay, from which batch size on, and if not, why?

    python -m dataparallel.bench                                     # FashionCNN, on GPUs or on threads of the CPU
    python -m dataparallel.bench --model mlp --batch-sizes 32,512

Sweeps the batch size, for inference and for a training step: the plain module, ``nn.DataParallel``, its four steps by hand
(dataparallel/parallel.py), and one process per device. All variants take turns within one run. Writes plots with error bars,
the cost of each step, and an explanation made from the measurements.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch

from common.cli import command, option, parse
from common.cores import usable_cores
from common.distributed.process_group import DistEnv
from common.distributed.rank_logging import Progress
from common.errors import UsageError
from common.files.run_directory import files_line
from common.reporting.benchmark import run_alone, write_results
from common.reporting.benchmark_figures import plot_stacked, plot_sweep
from common.reporting.timing import interleave
from common.training.models import LEAST_SAMPLES, MODELS
from common.training.precision import PRECISIONS
from dataparallel.bench.explanation import Point, explain
from dataparallel.bench.variants import HANDWRITTEN, MODES, PLAIN, STEP_BY_STEP, Comparison
from dataparallel.devices import parse_devices

WARMUP = 1


@dataclass(frozen=True)
class DataParallelBenchConfig:
    """Settings of ``dataparallel.bench``.

    :raises UsageError: for devices that do not exist, or batches too small for all devices
    """

    model: str = option("fashion-cnn", "the model that is run", choices=MODELS)
    devices: str = option(
        "auto", "as cuda:0,cuda:1 or cpu,cpu; auto takes all GPUs if there are several, else the CPU several times"
    )
    batch_sizes: tuple[int, ...] = option((8, 32, 128, 512), "samples per call, over all devices", minimum=1)
    mode: tuple[str, ...] = option(MODES, "what to time", choices=MODES)
    precision: str = option("fp32", "as in ddp.train", choices=PRECISIONS)
    rounds: int = option(7, "measured rounds; in each, every variant takes one turn", minimum=2)
    threads: int = option(
        0, "CPU threads of the plain module, shared by CPU devices; 0 takes the usable cores", minimum=0, maximum=1024
    )
    output: Path = option(Path("runs/bench-dataparallel"), "folder of the JSON and the figures")

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_sizes", tuple(sorted(self.batch_sizes)))
        devices = parse_devices(self.devices)
        if len(devices) == 1:
            raise UsageError(f"--devices {self.devices} is a single device: name several, as cpu,cpu")
        if min(self.batch_sizes) < len(devices):
            raise UsageError(
                f"--batch-sizes {min(self.batch_sizes)} has no sample for each of {len(devices)} devices: "
                f"give at least {len(devices)}, or fewer --devices"
            )
        least = LEAST_SAMPLES.get(self.model, 1) * len(devices)
        if min(self.batch_sizes) < least and "training" in self.mode:
            raise UsageError(
                f"--batch-sizes {min(self.batch_sizes)}: {self.model} is trained with several samples per device, as "
                f"BatchNorm needs: give at least {least}"
            )


@command
def main() -> None:
    config = parse(DataParallelBenchConfig, "dataparallel.bench", __doc__)
    devices = parse_devices(config.devices)
    comparison = Comparison(config.model, devices, config.precision)
    torch.set_num_threads(config.threads or usable_cores())
    run_alone(
        "dataparallel.bench",
        config.output,
        lambda: measure(config, comparison),
        lambda points: report(config, comparison, points),
        devices[0],
    )


def measure(config: DataParallelBenchConfig, comparison: Comparison) -> list[Point]:
    """Time all variants, for each mode and batch size."""
    points = []
    rounds = len(config.mode) * len(config.batch_sizes) * (config.rounds + WARMUP)
    with (
        Progress(DistEnv.alone(comparison.devices[0]), "bench", rounds) as progress,
        comparison.open_processes(max(config.batch_sizes)) as processes,
    ):
        for mode, batch_size in itertools.product(config.mode, config.batch_sizes):
            variants = comparison.open(mode, batch_size, processes)
            after_round = functools.partial(_advance, progress, f"{mode}, batch size {batch_size}")
            seconds = interleave(variants, config.rounds, WARMUP, after_round)
            timed = STEP_BY_STEP if STEP_BY_STEP in variants else HANDWRITTEN
            steps = {name: variant.steps[-config.rounds :] for name, variant in variants.items()}
            points.append(Point(mode, batch_size, seconds, timed, steps))
    return points


def _advance(progress: Progress, facts: str, done: int) -> None:
    progress.advance(1, facts)


def report(config: DataParallelBenchConfig, comparison: Comparison, points: list[Point]) -> str:
    """Write the JSON and the figures, and return the summary to print."""
    devices = [str(device) for device in comparison.devices]
    write_results(
        config.output / "dataparallel.json",
        {
            "model": config.model,
            "devices": devices,
            "precision": config.precision,
            "megabytes": comparison.megabytes,
            "points": [point.as_json() for point in points],
        },
    )
    title = f"{config.model}, {len(devices)} x {comparison.devices[0].type}, {config.precision}"
    names = []
    for mode in config.mode:
        ours = [point for point in points if point.mode == mode]
        curves = {
            name: {i: (point.seconds[name], point.batch_size) for i, point in enumerate(ours)}
            for name in ours[0].seconds
            if name != STEP_BY_STEP
        }
        names.append(f"{mode}.png")
        plot_sweep(
            config.output / names[-1],
            "batch_size",
            config.batch_sizes,
            curves,
            cores=usable_cores(),
            title=f"{mode}: {title}",
            logarithmic=True,
        )
    names.append("steps.png")
    _plot_steps(config.output / names[-1], config, points, title)
    return "\n".join([title, *explain(comparison, points), files_line(config.output, ["dataparallel.json", *names])])


def _plot_steps(path: Path, config: DataParallelBenchConfig, points: list[Point], title: str) -> None:
    panels, others = {}, {}
    for mode in config.mode:
        ours = [point for point in points if point.mode == mode]
        panels[mode] = {
            step: [point.median_steps()[step] / point.median(PLAIN) for point in ours]
            for step in ours[0].median_steps()
        }
        others[mode] = {
            name: [point.median(name) / point.median(PLAIN) for point in ours]
            for name in ours[0].seconds
            if name not in (PLAIN, HANDWRITTEN, STEP_BY_STEP)
        }
    plot_stacked(
        path,
        panels,
        config.batch_sizes,
        x_title="batch size",
        y_title="time, in multiples of the plain module's",
        title=f"time of the handwritten variant, by step: {title}",
        line=(1.0, PLAIN),
        points=others,
    )


if __name__ == "__main__":
    main()
