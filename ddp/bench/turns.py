"""Variants that take turns in the same processes: what ``ddp.bench engines`` and ``ddp.bench sharding`` measure by.

The service of each rank has a method ``run(name, steps)``, which trains that variant by :func:`timed_steps`.
"""

from __future__ import annotations

import ctypes
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from common.distributed.worker_group import WorkerGroup
from common.reporting.benchmark import CPU
from common.reporting.clock import clock_of

WARMUP = 1  # rounds
# Unmeasured steps of each variant: buckets are rebuilt after the first, PowerSGD begins with the third.
SETTLING_STEPS = 3


class VariantTurn:
    """A variant's turn: some steps on all ranks at once.

    A call returns the seconds of one step on the slowest rank, and appends the processor seconds to ``processor_seconds``.
    """

    def __init__(self, ranks: WorkerGroup, name: str, steps: int) -> None:
        self._ranks, self._name, self._steps = ranks, name, steps
        self.processor_seconds: list[float] = []

    def __call__(self) -> float:
        taken: list[tuple[float, float]] = self._ranks.call("run", self._name, self._steps)
        self.processor_seconds.append(statistics.fmean(processor_seconds for _, processor_seconds in taken))
        return max(seconds for seconds, _ in taken)


def timed_steps(step: Callable[[], None], steps: int, device: torch.device = CPU) -> tuple[float, float]:
    """Call ``step`` so often, on all ranks at once.

    :param device: where its work is done
    :returns: wall seconds of a step, until its work is done, and processor seconds of all threads of this rank in it, both
        means. (On a GPU the latter are those that it takes to queue the work.)
    """
    clock = clock_of(device)
    dist.barrier()
    clock.start()
    began, processor_began = clock.stamp(), time.process_time()
    for _ in range(steps):
        step()
    ended, processor_seconds = clock.stamp(), time.process_time() - processor_began
    return (clock.seconds(ended) - clock.seconds(began)) / steps, processor_seconds / steps


def keep_freed_memory() -> None:
    """Make malloc keep freed memory for the next step instead of returning it to the kernel."""
    set_malloc(trim_threshold=2**31 - 1, mmap_threshold=32 << 20)  # their maxima


def set_malloc(**options: int) -> None:
    """Set options of glibc's malloc, see mallopt(3); without glibc nothing is done.

    :param options: ``trim_threshold`` and ``mmap_threshold`` in bytes
    """
    numbers = {"trim_threshold": -1, "mmap_threshold": -3}  # in malloc.h
    if platform.libc_ver()[0] == "glibc":
        for name, value in options.items():
            ctypes.CDLL(None).mallopt(numbers[name], value)
