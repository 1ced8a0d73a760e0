"""The time of one image, stage by stage, and of sending a batch to the main process.

Files of images say themselves when a stage begins and ends (``ImageFiles.span``), in one process without other work.
``python -m dataloading.doctor`` looks into anybody's data set, line by line.
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
from dataloading.dataset.batches import ImageBatches, collate
from dataloading.dataset.image_files import ImageFiles
from dataloading.dataset.sampler import SampleKey
from dataloading.loader.stock_loader import stock_loader

SAMPLES = 128
SENT_BATCHES = 60


class StageSeconds:
    """Adds up the seconds of each stage.

    :ivar seconds: by name, in the order of the first time
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block of a stage."""
        began = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - began


def measure_stages(dataset: ImageFiles, setting: Setting) -> dict[str, float]:
    """Load some images in this process and time the stages; send batches of them from a worker.

    :param dataset: from ``Library.dataset`` for the setting
    :returns: seconds per image of each stage that the setting has, in their order
    """
    rng = np.random.default_rng(0)
    batches = max(1, SAMPLES // setting.batch_size)  # only full batches
    samples = rng.permutation(len(dataset))[: batches * setting.batch_size]
    # ImageBatches decodes a file for the shape, before the stages are timed.
    whole = None if setting.loader == "stock" else ImageBatches(dataset)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    items = []
    for epoch in range(2):
        dataset.span = stage = StageSeconds()  # the first epoch warms up
        for part in np.split(samples, range(setting.batch_size, len(samples), setting.batch_size)):
            if whole is not None:
                whole.__getitems__(BatchKey(epoch, part))
            else:
                items = [dataset[SampleKey(epoch, sample)] for sample in part.tolist()]
                with stage("collate"):
                    collate(items)
    torch.set_num_threads(threads)
    costs = {name: seconds / len(samples) for name, seconds in stage.seconds.items()}
    if items and setting.workers:
        costs["IPC"] = max(0.0, _send(items) - costs["collate"])
    return costs


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
    samples = sum(len(items) for _ in iterator)
    return (time.perf_counter() - began) / samples
