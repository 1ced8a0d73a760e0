"""One process that starts loader workers, once for each of two epochs: its time to the first batch, and its workers' memory.

    python -m dataloading.bench.start_once spawn 2 1000000 FOLDER "nothing else"

It is a process of its own, since there is one fork server for each, and since memory that was freed before would hide a copy.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from common.data.datasets import Batch, BatchKey
from dataloading.dataset.batches import ImageBatches
from dataloading.dataset.decoders import Pixels
from dataloading.dataset.image_files import ImageFiles
from dataloading.loader.fast_loader import FastLoader
from dataloading.loader.stock_loader import stock_loader

PRELOADED = "forkserver-preloaded"
NOTHING = "nothing else"
METHODS = ("fork", "forkserver", PRELOADED, "spawn", "threads")
BATCH_SIZE, BATCHES = 32, 20


class Annotated(ImageBatches):
    """Images, and annotations as people often keep them: a Python list of lists, of which each sample reads its part.

    :param extra: something that a data set may hold
    """

    def __init__(self, files: ImageFiles, annotations: int, extra: Any) -> None:
        super().__init__(files)
        self.annotations = [[number, 0, 9, 9] for number in range(annotations)]
        self.extra = extra

    def assemble(self, key: BatchKey, buffer: Pixels) -> Batch:
        for sample in key.samples.tolist():
            self.annotations[sample :: len(self)]
        return super().assemble(key, buffer)


# Things that a data set may hold, and that a worker may not get.
EXTRAS: dict[str, Callable[[], Any]] = {
    NOTHING: lambda: None,
    "a lambda": lambda: lambda: None,
    "a lock": threading.Lock,
}


def make_loader(method: str, workers: int, annotations: int, folder: str, extra: str) -> Any:
    """A loader of :data:`BATCHES` batches.

    :param method: one of :data:`METHODS`
    :param extra: the name of one of :data:`EXTRAS`
    """
    files = ImageFiles(folder)
    dataset = Annotated(files.subset(np.arange(BATCH_SIZE * BATCHES) % len(files)), annotations, EXTRAS[extra]())
    if method == "threads":
        return FastLoader(dataset, BATCH_SIZE, num_workers=workers)
    if method == PRELOADED:
        multiprocessing.set_forkserver_preload(["torch", "dataloading.dataset"])
    context = method.partition("-")[0]
    return stock_loader(dataset, workers, batch_size=BATCH_SIZE, multiprocessing_context=context)


def start(loader: Any, workers: int) -> dict[str, float]:
    """Two epochs.

    :returns: seconds from ``iter`` to the first batch of each, and a worker's own memory near their end (USS). Threads have none
    """
    import psutil  # not for --help

    result = {}
    for epoch in ("first epoch, s", "second epoch, s"):
        began = time.perf_counter()
        iterator = iter(loader)
        next(iterator)
        result[epoch] = time.perf_counter() - began
        for _ in range(BATCHES - 2):
            next(iterator)
        # HACK: torch's own list of its processes. Under another name, they are taken for threads.
        infos = [psutil.Process(worker.pid).memory_full_info() for worker in getattr(iterator, "_workers", [])]
        own_memory = sum(info.uss for info in infos) / workers / 1e9
        for _ in iterator:
            pass
    return result | {"own memory, GB": own_memory}


def main() -> None:
    method, workers, annotations, folder, extra = sys.argv[1:]
    print(json.dumps(start(make_loader(method, int(workers), int(annotations), folder, extra), int(workers))))


if __name__ == "__main__":
    main()
