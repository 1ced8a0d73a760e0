"""The work of a worker, or of the main process without workers: samples, collate, and the way to the main process."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import reduction
from typing import Any

from torch.utils import data

# HACK: DataLoader's own parts. If torch renames one, the script ends with an ImportError or AttributeError that names it.
from torch.utils.data._utils import fetch, worker

from .events import emit, file_of, replace
from .sampling import sampler
from .settings import is_one_by_one

SLOWEST = 3  # samples of each batch that are named
LONG_S = 0.01  # of a sample, which is worth a look at how long it waited


class Collector:
    """Python's garbage collector, which stops whoever makes objects until it has looked at old ones.

    :ivar seconds: that it has taken so far
    """

    def __init__(self) -> None:
        self.seconds = self._began = 0.0
        gc.callbacks.append(self.garbage_collection)

    def garbage_collection(self, phase: str, _: Any) -> None:
        if phase == "start":
            self._began = time.monotonic()
        else:
            self.seconds += time.monotonic() - self._began


collector = Collector()


def _excused() -> float:
    """Seconds so far in which a sample could not be worked on: other programs used the cores, as the sampler noticed, or garbage was
    collected."""
    return sampler.late() - time.thread_time() + collector.seconds


class Fetch:
    """The batch that is being fetched.

    :ivar slowest: the seconds and the index of the slowest samples that were fetched alone
    """

    def __init__(self) -> None:
        self.slowest: list[tuple[float, Any]] = SLOWEST * [(-1.0, None)]
        self.collate = 0.0

    def one_by_one(self, indices: Any) -> Iterator[Any]:
        """The indices; whoever asks for the next has fetched the one before. A sample may take a microsecond, so this takes less."""
        began, excused = time.monotonic(), _excused()
        for index in indices:
            yield index
            ended = time.monotonic()
            seconds = ended - began
            began = ended
            if seconds > LONG_S:
                before, excused = excused, _excused()
                seconds -= min(seconds, max(0.0, excused - before))
            if seconds > self.slowest[-1][0]:
                self.slowest = sorted([*self.slowest[:-1], (seconds, index)], key=lambda one: -one[0])


_now = Fetch()


@replace(fetch._BaseDatasetFetcher, "__init__")
def make(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    collate = self.collate_fn

    def timed_collate(samples: Any) -> Any:
        began = time.monotonic()
        try:
            return collate(samples)
        finally:
            _now.collate += time.monotonic() - began

    self.collate_fn = timed_collate


@replace(fetch._MapDatasetFetcher, "fetch")
def fetch_samples(original: Any, self: Any, indices: Any) -> Any:
    return _fetch(original, self, indices, self.auto_collation and is_one_by_one(self.dataset))


@replace(fetch._IterableDatasetFetcher, "fetch")
def fetch_next(original: Any, self: Any, indices: Any) -> Any:
    return _fetch(original, self, indices, False)


def _fetch(original: Any, self: Any, indices: Any, one_by_one: bool) -> Any:
    global _now
    _now = now = Fetch()
    began, collected = time.monotonic(), collector.seconds
    fetched = original(self, now.one_by_one(indices) if one_by_one else indices)
    emit(
        "fetch",
        loader=sampler.loader,
        began=began,
        ended=time.monotonic(),
        collate=now.collate,
        collected=collector.seconds - collected,
        samples=len(indices) if hasattr(indices, "__len__") else 1,
        slowest=[(str(index), seconds) for seconds, index in now.slowest if seconds >= 0.0],
    )
    return fetched


@replace(reduction.ForkingPickler, "dumps")
def send(original: Any, value: Any, *args: Any) -> Any:
    """In a worker, the queue's thread turns a batch into bytes, and copies what is not in shared memory yet."""
    began = time.monotonic()
    sent = original(value, *args)
    if data.get_worker_info() is not None:
        emit("sent", seconds=time.monotonic() - began)
    return sent


@replace(worker, "_worker_loop")
def work(original: Any, *args: Any, **kwargs: Any) -> None:
    emit("worker")
    listen()
    sampler.start()
    try:
        original(*args, **kwargs)
    finally:
        sampler.finish()


def listen() -> None:
    """Write the stacks of all threads on SIGUSR2, also while a thread holds the GIL. Above them stands the process."""
    stack = file_of("stack")
    os.pwrite(stack, f"{os.getpid():>10}\n".encode(), 0)
    os.lseek(stack, 0, os.SEEK_END)
    faulthandler.register(signal.SIGUSR2, stack)
