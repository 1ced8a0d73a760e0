"""Timing many settings under the same conditions: each once per round, round after round."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.reporting.timing import interleave
from dataloading.bench.settings import Library, Setting
from dataloading.loader.stock_loader import iterate


@dataclass(frozen=True)
class LoadingMeasurement:
    """A setting's runs, one entry per round.

    :param setting: the setting
    :param batches: number of batches in ``steady``
    :param first_batch: seconds from requesting an iterator to its first batch, with the start of the workers
    :param steady: seconds of the batches after the warm-up
    :param memory_mb: unique set size of each worker process
    """

    setting: Setting
    batches: int
    first_batch: list[float]
    steady: list[float]
    memory_mb: list[float]

    @property
    def images_per_s(self) -> float:
        """Throughput of the median run after its warm-up."""
        return self.batches * self.setting.batch_size / statistics.median(self.steady)

    @property
    def per_image(self) -> list[float]:
        """Seconds, one entry per round."""
        return [seconds / (self.batches * self.setting.batch_size) for seconds in self.steady]


def measure(
    library: Library,
    settings: Sequence[Setting],
    *,
    batches: int,
    repeats: int,
    after_round: Callable[[int], None] = lambda done: None,
) -> list[LoadingMeasurement]:
    """Run every setting once per round; a first round warms up and does not count.

    :param batches: timed batches of each run, after its warm-up
    :param repeats: rounds that count
    :param after_round: called with the number of finished rounds
    """
    with contextlib.ExitStack() as stack:
        runs = {}
        for setting in settings:
            make_loader = functools.partial(library.loader, setting)
            ahead, kept = setting.prefetch_factor * setting.workers, setting.persistent_workers
            runs[setting] = LoaderRun(make_loader, setting.workers, ahead, batches, library.device, persistent=kept)
            stack.callback(runs[setting].close)
        interleave({str(number): run for number, run in enumerate(runs.values())}, repeats, after_round=after_round)
        return [
            LoadingMeasurement(setting, batches, run.first_batch[-repeats:], run.steady[-repeats:], run.memory_mb)
            for setting, run in runs.items()
        ]


class LoaderRun:
    """Repeated runs of one loader; a call makes one run and returns the seconds of its steady part.

    :param make_loader: makes a loader of a number of batches
    :param workers: threads or processes of the loader
    :param ahead: batches that the loader prefetches
    :param batches: timed batches, after the warm-up
    :param device: where batches are copied to, if it is not the CPU
    :param persistent: whether its workers are persistent; a run then consumes all batches, so that they are idle at its end
    """

    def __init__(
        self,
        make_loader: Callable[[int], Iterable[Any]],
        workers: int,
        ahead: int,
        batches: int,
        device: torch.device,
        persistent: bool = False,
    ) -> None:
        # The first batches come before all workers are busy, and the last when some are idle already. So the timed batches
        # lie between, and the prefetched ones at the end are never requested.
        self._going, self._batches, self._device, self._persistent = max(2, workers), batches, device, persistent
        self._loader = make_loader(self._going + batches + max(2, ahead))
        self._workers: list[int] = []
        self.first_batch: list[float] = []
        self.steady: list[float] = []
        self.memory_mb: list[float] = []

    def __call__(self) -> float:
        others = {process.pid for process in multiprocessing.active_children()}
        began = time.perf_counter()
        iterator = iterate(self._loader)
        self._take(iterator, 1)
        first = time.perf_counter()
        self._take(iterator, self._going - 1)
        going = time.perf_counter()
        self._take(iterator, self._batches)
        end = time.perf_counter()

        started = [process.pid for process in multiprocessing.active_children() if process.pid not in others]
        self._workers = [
            pid for pid in started if pid is not None
        ] or self._workers  # persistent workers started in an earlier run
        self.memory_mb = [_memory_mb(pid) for pid in self._workers]
        self.first_batch.append(first - began)
        self.steady.append(end - going)
        if self._persistent:  # otherwise prefetching would go on while another loader is timed
            for _ in iterator:
                pass
        return end - going

    def close(self) -> None:
        """End persistent workers."""
        if hasattr(self._loader, "close"):
            self._loader.close()
        del self._loader

    def _take(self, iterator: Any, batches: int) -> None:
        for _ in range(batches):
            batch = next(iterator)
            if self._device.type != "cpu" and len(batch):  # if all files were skipped, the batch is an empty list
                batch[0].to(self._device, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _memory_mb(pid: int) -> float:
    import psutil

    return float(psutil.Process(pid).memory_full_info().uss / 1e6)
