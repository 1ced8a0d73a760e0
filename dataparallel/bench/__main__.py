"""Does data parallelism in one process pay, from which batch size on, and if not, why?

    python -m dataparallel.bench                                     # FashionCNN, on GPUs or on threads of the CPU
    python -m dataparallel.bench --model mlp --batch-sizes 32,512

Sweeps the batch size, for inference and for a training step: the plain module, ``nn.DataParallel``, its four steps by hand
(dataparallel/parallel.py), and one process per device. All variants take turns within one run. Writes plots with error bars,
the cost of each step, and from which batch size on each pays.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from common.cli import command
from common.distributed.worker_group import WorkerGroup
from common.machine import usable_cores
from common.reporting.benchmark_figures import plot_stacked, plot_sweep
from common.reporting.other_work import OtherWork
from common.reporting.timing import interleave
from common.reporting.turns import WARMUP, Rounds, run_benchmark, write_report
from dataparallel.bench.config import MODES, DataParallelBenchConfig
from dataparallel.bench.explanation import Point, explain
from dataparallel.bench.variants import HANDWRITTEN, PLAIN, STEP_BY_STEP, ReplicaWorker, build_variants


@command
def main() -> None:
    run_benchmark(DataParallelBenchConfig, "dataparallel.bench", __doc__, None, measure, report)


def measure(config: DataParallelBenchConfig) -> tuple[list[Point], bool]:
    """Time all variants, for each mode and batch size; and whether other programs used the cores meanwhile."""
    torch.set_num_threads(usable_cores())
    devices, points, others = config.parsed_devices, [], OtherWork()
    timed = HANDWRITTEN if config.on_cpu else STEP_BY_STEP
    with (
        Rounds(len(MODES) * len(config.batch_sizes)) as progress,
        WorkerGroup(
            len(devices), ReplicaWorker, config, device=devices[0].type, threads=config.threads_of_one
        ) as processes,
    ):
        for mode in MODES:
            for batch_size in config.batch_sizes:
                variants: Any = build_variants(config, mode, batch_size, timed, processes)
                turns: Any = interleave(variants, config.rounds, WARMUP)
                progress.advance(1, f"{mode}, batch size {batch_size}")
                seconds = {name: [total for total, _ in own] for name, own in turns.items()}
                points.append(Point(mode, batch_size, seconds, timed, [steps for _, steps in turns[timed]]))
    return points, others.doubt() is not None


def report(config: DataParallelBenchConfig, measured: tuple[list[Point], bool]) -> str:
    """Write the JSON and the figures, and return the summary to print."""
    points, disturbed = measured
    devices = [str(device) for device in config.parsed_devices]
    title = f"{config.model}, {len(devices)} x {devices[0]}, {config.precision}"
    rates: dict[str, dict[str, dict[int, list[float]]]] = {}
    panels = {}
    for mode in MODES:
        ours = [point for point in points if point.mode == mode]
        rates[mode] = {
            name: {i: [point.batch_size / s for s in point.seconds[name]] for i, point in enumerate(ours)}
            for name in ours[0].seconds
            if name != STEP_BY_STEP
        }
        panels[mode] = {
            step: [point.median_steps()[step] / point.median(PLAIN) for point in ours]
            for step in ours[0].median_steps()
        }
    plot_sweep(config.output / "throughput.png", "batch size", config.batch_sizes, rates, title=title)
    plot_stacked(
        config.output / "steps.png",
        panels,
        config.batch_sizes,
        y_title="batch size",
        x_title="time, in multiples of the plain module's",
        title=f"time of the handwritten variant, by step: {title}",
        line=1.0,
    )
    content = {"devices": devices, "points": [asdict(point) for point in points]}
    lines = [title, *explain(config, points, disturbed)]
    return write_report(config, "dataparallel", content, ["throughput", "steps"], lines)


if __name__ == "__main__":
    main()
