"""The cost of one image, stage by stage, and of sending a batch to the main process.

The data set itself times the stages (``LFWDataset.span``), in one process without other work. CPU time is measured beside
wall time: a stage that only waits occupies no core.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from common.data.datasets import BatchKey
from dataloading.bench.settings import Setting
from dataloading.dataset.batches import LFWBatches, collate
from dataloading.dataset.lfw import LFWDataset
from dataloading.dataset.sampler import SampleKey
from dataloading.loader.stock_loader import iterate, stock_loader

STAGES = ("open", "read", "decode", "resize", "augment", "transform", "collate", "IPC")
SAMPLES = 256
SLOW_SAMPLES = 64
SENT_BATCHES = 60


@dataclass(frozen=True)
class Stage:
    """Seconds per image: wall time and CPU time."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class StageCosts:
    """The cost of an image.

    :param stages: the stages that the setting has, by the names of :data:`STAGES`
    """

    stages: dict[str, Stage]

    @property
    def wall(self) -> float:
        """Seconds per image of one worker."""
        return sum(stage.wall for stage in self.stages.values())

    @property
    def cpu(self) -> float:
        """CPU seconds per image."""
        return sum(stage.cpu for stage in self.stages.values())

    @property
    def waiting(self) -> float:
        """The share of the wall time that is waiting for storage: only open and read do. (Others may have been preempted.)"""
        storage = [self.stages[name] for name in ("open", "read")]
        return sum(max(0.0, stage.wall - stage.cpu) for stage in storage) / self.wall

    @property
    def largest(self) -> str:
        """The stage with the most CPU time."""
        return max(self.stages, key=lambda name: self.stages[name].cpu)


class _Stopwatch:
    """Sums the time of spans by name."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.thread_time()
        yield
        self.wall[stage] += time.perf_counter() - wall
        self.cpu[stage] += time.thread_time() - cpu


def measure_stages(dataset: LFWDataset, setting: Setting) -> StageCosts:
    """Load some images in this process with a stopwatch, and send batches of them from a worker.

    :param dataset: from ``Library.dataset`` for the setting
    """
    rng = np.random.default_rng(0)
    batches = max(1, (SLOW_SAMPLES if setting.latency_ms else SAMPLES) // setting.batch_size)  # only full batches
    samples = rng.permutation(len(dataset))[: batches * setting.batch_size]
    whole = (
        None if setting.loader == "stock" else LFWBatches(dataset)
    )  # it decodes a file for the shape, before the stopwatch runs
    before, threads = dataset.span, torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        for epoch in range(2):  # the first warms up
            dataset.span = stopwatch = _Stopwatch()
            items = []
            for part in np.split(samples, range(setting.batch_size, len(samples), setting.batch_size)):
                if whole is not None:
                    whole.__getitems__(BatchKey(epoch, part))
                else:
                    items = [dataset[SampleKey(epoch, sample)] for sample in part.tolist()]
                    with stopwatch("collate"):
                        collate(items)
    finally:
        dataset.span = before
        torch.set_num_threads(threads)
    if items and setting.uses_processes:
        collating = stopwatch.wall["collate"] / len(samples)
        stopwatch.wall["IPC"] = stopwatch.cpu["IPC"] = max(0.0, _send(items) - collating) * len(samples)
    stages = {
        name: Stage(stopwatch.wall[name] / len(samples), stopwatch.cpu[name] / len(samples))
        for name in STAGES
        if name in stopwatch.wall
    }
    return StageCosts(stages)


class _Ready(Dataset[Any]):
    """Prepared items: a worker only collates and sends them."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return self.items


def _send(items: list[Any]) -> float:
    """Seconds per image of one worker that only collates and sends.

    In a worker, ``default_collate`` writes into shared memory, whose pages the kernel makes then. So it is timed there, and the
    caller subtracts the cost of collating in private memory.
    """
    count = SENT_BATCHES * len(items)
    loader = stock_loader(
        _Ready(items),
        1,
        batch_size=len(items),
        sampler=range(count),
        collate_fn=collate,
    )
    iterator = iterate(loader)
    for _ in range(SENT_BATCHES // 4):
        next(iterator)
    began = time.perf_counter()
    images = sum(len(items) for _ in iterator)
    return (time.perf_counter() - began) / images
