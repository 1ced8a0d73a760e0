"""What page-locked memory is worth: copies of a batch to the GPU from it and from ordinary memory.

    python -m ddp.gpu_check.pinned

A copy from ordinary memory goes through a page-locked buffer of the driver's, and the host waits while it is filled. From
page-locked memory the GPU reads by itself: the call returns at once, and the copy may run beside a kernel.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.cli import command, option
from common.errors import UsageError
from common.files.run_directory import files_line
from common.gpu.devices import count_gpus, why_no_gpu
from common.reporting.clock import clock_of
from common.reporting.timing import interleave
from common.reporting.turns import run_benchmark, write_results

BATCH = (128, 3, 224, 224)  # a byte per color
ROUNDS, WARMUP = 20, 3  # copies of each kind


@dataclass(frozen=True)
class PinnedConfig:
    """Settings of ``ddp.gpu_check.pinned``.

    :raises UsageError: without a GPU
    """

    output: Path = option(Path("runs/gpu-check-pinned"), "folder of the JSON")

    def __post_init__(self) -> None:
        if not count_gpus():
            raise UsageError(f"copies to a GPU cannot be timed: {why_no_gpu()}")


@command
def main() -> None:
    run_benchmark(
        PinnedConfig, "ddp.gpu_check.pinned", __doc__, None, measure, lambda config, seconds: report(config, *seconds)
    )


def measure(_: PinnedConfig) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """For each kind of memory, the seconds that a copy takes on the GPU, and those that the host spends in the call."""
    device = torch.device("cuda", 0)
    batch = torch.randint(256, BATCH, dtype=torch.uint8)
    clock = clock_of(device)
    host_seconds: dict[str, list[float]] = {"ordinary": [], "page-locked": []}

    def copy(kind: str, source: Tensor) -> Callable[[], float]:
        def seconds() -> float:
            clock.start()
            began, called = clock.stamp(), time.perf_counter()
            source.to(device, non_blocking=True)
            host_seconds[kind].append(time.perf_counter() - called)
            return clock.seconds(clock.stamp()) - clock.seconds(began)

        return seconds

    sources = {"ordinary": batch, "page-locked": batch.pin_memory()}
    taken = interleave({kind: copy(kind, source) for kind, source in sources.items()}, ROUNDS, WARMUP)
    return taken, {kind: seconds[WARMUP:] for kind, seconds in host_seconds.items()}


def report(config: PinnedConfig, device_seconds: dict[str, list[float]], host_seconds: dict[str, list[float]]) -> str:
    """Write the JSON, and return the summary to print."""
    size = math.prod(BATCH)
    content = {"bytes": size, "device_seconds": device_seconds, "host_seconds": host_seconds}
    write_results(config.output / "pinned.json", content)
    lines = [f"a batch of {BATCH[0]} images, {size / 1e6:.0f} MB, to the GPU; medians of {ROUNDS}"]
    for kind, seconds in device_seconds.items():
        rate, of_host = 1e-9 * size / statistics.median(seconds), 1e3 * statistics.median(host_seconds[kind])
        lines.append(f"{kind:>12} memory: {rate:.1f} GB/s, {of_host:.2f} ms of the host")
    return "\n".join([*lines, files_line(config.output, ("pinned.json",))])


if __name__ == "__main__":
    main()
