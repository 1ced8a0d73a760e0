"""Does data parallelism in one process pay, from which batch size on, and if not, why?

    python -m dataparallel.bench                                     # FashionCNN, on GPUs or on threads of the CPU
    python -m dataparallel.bench --model mlp --batch-sizes 32,512

Sweeps the batch size, for inference and for a training step: the plain module, ``nn.DataParallel`` on GPUs, and its four steps by hand
(dataparallel/parallel.py), with the time of each. All variants take turns within one run. (One process per device is compared by
``python -m ddp.bench scaling``.)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from common.benchmarking.figures import plot_stacked
from common.benchmarking.timing import interleave
from common.benchmarking.turns import WARMUP, Rounds, run_benchmark, write_report
from common.command_line.cli import command, option
from common.errors import UsageError
from common.machine import usable_cores
from common.models.build import LEAST_SAMPLES, MODELS
from dataparallel.bench.variants import MODES, PLAIN, STEP_BY_STEP, build_variants
from dataparallel.bench.verdict import Point, explain
from dataparallel.devices import parse_devices


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
    rounds: int = option(7, "measured rounds; in each, every variant takes one turn", minimum=2)
    output: Path = option(Path("runs/bench-dataparallel"), "folder of the JSON and the figure")

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_sizes", tuple(sorted(self.batch_sizes)))
        devices = len(self.parsed_devices)
        if devices == 1:
            raise UsageError(f"--devices {self.devices} is a single device: name several, as cpu,cpu")
        least = LEAST_SAMPLES.get(self.model, 1) * devices
        if min(self.batch_sizes) < least:
            raise UsageError(
                f"--batch-sizes {min(self.batch_sizes)} is too small for {self.model} on {devices} devices: give at least {least}"
            )

    @property
    def parsed_devices(self) -> tuple[torch.device, ...]:
        """GPUs, or the CPU several times."""
        return parse_devices(self.devices)


@command
def main() -> None:
    run_benchmark(DataParallelBenchConfig, "dataparallel.bench", __doc__, None, measure, report)


def measure(config: DataParallelBenchConfig) -> list[Point]:
    """Time all variants, for each mode and batch size."""
    torch.set_num_threads(usable_cores())
    points = []
    with Rounds(len(MODES) * len(config.batch_sizes)) as progress:
        for mode in MODES:
            for batch_size in config.batch_sizes:
                variants: Any = build_variants(config.model, config.parsed_devices, mode, batch_size)
                turns: Any = interleave(variants, config.rounds, WARMUP)
                progress.advance(1, f"{mode}, batch size {batch_size}")
                seconds = {name: [total for total, _ in own] for name, own in turns.items()}
                points.append(Point(mode, batch_size, seconds, [steps for _, steps in turns[STEP_BY_STEP]]))
    return points


def report(config: DataParallelBenchConfig, points: list[Point]) -> str:
    """Write the JSON and the figure, and return the summary to print."""
    devices = [str(device) for device in config.parsed_devices]
    title = f"{config.model}, {len(devices)} x {devices[0]}, fp32"
    panels = {}
    for mode in MODES:
        ours = [point for point in points if point.mode == mode]
        panels[mode] = {
            step: [point.median_steps()[step] / point.median(PLAIN) for point in ours]
            for step in ours[0].median_steps()
        }
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
    return write_report(config, "dataparallel", content, ["steps"], [title, *explain(points)])


if __name__ == "__main__":
    main()
