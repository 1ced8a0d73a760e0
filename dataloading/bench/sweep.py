"""Timing many settings in the same weather: each once per round, round after round."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from common.reporting.timing import interleave
from dataloading.bench.settings import Library, Setting
from dataloading.loader.stock_loader import each


@dataclass(frozen=True)
class Memory:
    """A worker process's memory in MB: what it has for itself, and with its share of what it shares (None if unknown)."""

    unique: float
    proportional: float | None


@dataclass(frozen=True)
class Measured:
    """A setting's runs, one entry per round; in a round all settings met the same weather.

    :param first_batch: seconds from asking for an iterator to its first batch: the start of the workers, and that batch
    :param steady: seconds that the run's batches took after that
    :param memory: of each worker process
    """

    setting: Setting
    batches: int
    first_batch: list[float]
    steady: list[float]
    memory: list[Memory]

    @property
    def images_per_s(self) -> float:
        """Of the median run, when it has got going."""
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
    device: torch.device,
    after_round: Callable[[int], None] = lambda done: None,
) -> list[Measured]:
    """Run every setting once per round; a first round warms up and does not count.

    :param batches: of each run, after those with which it gets going
    :param device: where batches are copied to, if it is not the CPU
    """
    with contextlib.ExitStack() as stack:
        runs = {}
        for setting in settings:
            make_loader = functools.partial(library.loader, setting)
            ahead, kept = setting.prefetch_factor * setting.workers, setting.persistent_workers
            runs[setting] = Run(make_loader, setting.workers, ahead, batches, device, persistent=kept)
            stack.callback(runs[setting].close)
        interleave({str(number): run for number, run in enumerate(runs.values())}, repeats, after_round=after_round)
        return [
            Measured(setting, batches, run.first_batch[-repeats:], run.steady[-repeats:], run.memory)
            for setting, run in runs.items()
        ]


class Run:
    """Repeated runs of one loader; calling it makes one, and gives the seconds of its steady part.

    :param make_loader: makes a loader of so many batches
    :param ahead: batches that the loader has on their way
    :param batches: that are timed, after those with which it gets going
    :param persistent: whether its workers are kept; they are then left without work when a run ends
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
        # The first batches come while other workers are still in their first; the last would come while some have no work
        # any more. So the run lies between, and those that are on their way at its end are never asked for.
        self._going, self._batches, self._device, self._persistent = max(2, workers), batches, device, persistent
        self._loader = make_loader(self._going + batches + max(2, ahead))
        self._workers: list[int] = []
        self.first_batch: list[float] = []
        self.steady: list[float] = []
        self.memory: list[Memory] = []

    def __call__(self) -> float:
        others = {process.pid for process in multiprocessing.active_children()}
        began = time.perf_counter()
        iterator = each(self._loader)
        self._take(iterator, 1)
        first = time.perf_counter()
        self._take(iterator, self._going - 1)
        going = time.perf_counter()
        self._take(iterator, self._batches)
        end = time.perf_counter()

        started = [process.pid for process in multiprocessing.active_children() if process.pid not in others]
        self._workers = [pid for pid in started if pid is not None] or self._workers  # persistent ones started before
        self.memory = [_memory(pid) for pid in self._workers]
        self.first_batch.append(first - began)
        self.steady.append(end - going)
        if self._persistent:  # what is on its way would be made while another loader is timed
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
            if self._device.type != "cpu" and len(batch):  # a batch of files that were all skipped has no images
                batch[0].to(self._device, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _memory(pid: int) -> Memory:
    info = psutil.Process(pid).memory_full_info()
    proportional = getattr(info, "pss", None)  # Linux only
    return Memory(info.uss / 1e6, None if proportional is None else proportional / 1e6)


def median_memory(measured: Measured) -> Memory | None:
    """Of its workers; None where it has none."""
    if not measured.memory:
        return None
    proportional = [memory.proportional for memory in measured.memory if memory.proportional is not None]
    unique = statistics.median(memory.unique for memory in measured.memory)
    return Memory(unique, statistics.median(proportional) if proportional else None)
