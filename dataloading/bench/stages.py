"""The time of one image, stage by stage, and of sending a batch to the main process.

The data set calls ``LFWDataset.span`` around each stage, in one process without other work.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from common.data.datasets import BatchKey
from dataloading.bench.settings import Setting
from dataloading.dataset.batches import LFWBatches, collate
from dataloading.dataset.lfw import LFWDataset
from dataloading.dataset.sampler import SampleKey
from dataloading.loader.stock_loader import stock_loader

SAMPLES = 256
SLOW_SAMPLES = 64
SENT_BATCHES = 60


def measure_stages(dataset: LFWDataset, setting: Setting) -> dict[str, float]:
    """Load some images in this process and record the stages; send batches of them from a worker.

    :param dataset: from ``Library.dataset`` for the setting
    :returns: seconds per image of each stage that the setting has, in their order
    """
    rng = np.random.default_rng(0)
    batches = max(1, (SLOW_SAMPLES if setting.latency_ms else SAMPLES) // setting.batch_size)  # only full batches
    samples = rng.permutation(len(dataset))[: batches * setting.batch_size]
    # LFWBatches decodes a file for the shape, before the stages are recorded.
    whole = None if setting.loader == "stock" else LFWBatches(dataset)
    blocks: list[tuple[str, float]] = []  # a list, since several threads may read files

    @contextlib.contextmanager
    def timed(stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        blocks.append((stage, time.perf_counter() - began))

    dataset.span, threads = timed, torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    items = []
    for epoch in range(2):
        blocks.clear()  # the first epoch warms up
        for part in np.split(samples, range(setting.batch_size, len(samples), setting.batch_size)):
            if whole is not None:
                whole.__getitems__(BatchKey(epoch, part))
            else:
                items = [dataset[SampleKey(epoch, sample)] for sample in part.tolist()]
                with timed("collate"):
                    collate(items)
    torch.set_num_threads(threads)
    seconds: dict[str, float] = defaultdict(float)
    for stage, taken in blocks:
        seconds[stage] += taken / len(samples)
    if items and setting.uses_processes:
        seconds["IPC"] = max(0.0, _send(items) - seconds["collate"])
    return dict(seconds)


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
    iterator = iter(loader)
    for _ in range(SENT_BATCHES // 4):
        next(iterator)
    began = time.perf_counter()
    images = sum(len(items) for _ in iterator)
    return (time.perf_counter() - began) / images
