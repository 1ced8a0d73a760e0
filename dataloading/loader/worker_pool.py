"""Who fills the fast loader's batches: a crew of threads, or a crew of processes.

Both are given each batch at once and cut it into pieces, so that the first batch is the work of all. Threads cost nothing
to start and take the next piece whenever they are free; processes each have a GIL of their own, which pays where a good
part of the work on an image holds it.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import multiprocessing.connection
import os
import queue
import signal
import threading
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from common.data.datasets import BatchKey
from common.errors import UsageError
from dataloading.dataset.batches import LFWBatches
from dataloading.loader.buffers import Lease
from dataloading.loader.failures import KILLED_BY

CHUNK = 8  # images that a thread takes at a time, at most
PARENT_CHECK_S = 5.0


@dataclass(eq=False)
class Assembly:
    """A batch that is being filled.

    :param missing: images that are neither there nor known to be bad
    :param skipped: places in the batch without an image
    :param errors: what went wrong, each with the first place that it concerns
    """

    key: BatchKey
    lease: Lease
    missing: int
    skipped: list[int] = field(default_factory=list)
    errors: list[tuple[int, BaseException]] = field(default_factory=list)

    def raise_first(self) -> None:
        """:raises BaseException: the error of the first sample that has one"""
        if self.errors:
            raise min(self.errors, key=lambda item: item[0])[1]


class Crew(Protocol):
    """Fills batches in the background."""

    def submit(self, assembly: Assembly) -> None:
        """Begin with a batch; those submitted before come first."""

    def wait(self, assembly: Assembly) -> None:
        """Until it is filled, or has failed."""

    def close(self) -> None:
        """End it; what is being filled is given up."""


class Threads:
    """A crew of threads, which decode at the same time because decoders release the GIL."""

    def __init__(self, dataset: LFWBatches, workers: int) -> None:
        self._dataset, self._workers = dataset, workers
        self._chunks: queue.SimpleQueue[tuple[Assembly, int, int] | None] = queue.SimpleQueue()
        self._stopping = False
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        try:
            for number in range(workers):
                thread = threading.Thread(target=self._work, name=f"fast-loader-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:
            self.close()
            raise UsageError(f"thread {len(self._threads) + 1} of {workers} cannot be started: {error}") from error

    def submit(self, assembly: Assembly) -> None:
        n = len(assembly.key.samples)
        size = max(1, min(CHUNK, n // (4 * self._workers)))
        for start in range(0, n, size):
            self._chunks.put((assembly, start, min(start + size, n)))

    def wait(self, assembly: Assembly) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not assembly.missing)

    def close(self) -> None:
        self._stopping = True
        for _ in self._threads:
            self._chunks.put(None)
        for thread in self._threads:
            thread.join()
        self._chunks = queue.SimpleQueue()  # what is left of it refers to batches' memory

    def _work(self) -> None:
        while (chunk := self._chunks.get()) is not None and not self._stopping:
            assembly, start, stop = chunk
            skipped, error = _fill(
                self._dataset, assembly.lease.pixels, assembly.key, start, stop, lambda: not self._stopping
            )
            with self._changed:
                assembly.skipped += skipped
                assembly.errors += [] if error is None else [(start, error)]
                assembly.missing -= stop - start
                if not assembly.missing:
                    self._changed.notify_all()
            del chunk, assembly  # a thread that waits for work must not keep a batch's memory in use


def _fill(
    dataset: LFWBatches,
    pixels: npt.NDArray[np.uint8],
    key: BatchKey,
    start: int,
    stop: int,
    wanted: Callable[[], bool] = lambda: True,
) -> tuple[list[int], BaseException | None]:
    try:
        return dataset.fill(pixels, key, start, stop, wanted), None
    except BaseException as error:
        return [], error


class Processes:
    """A crew of processes, which write into memory that they share with this one.

    Each gets its part of every batch by a pipe of its own and answers by it when that is done. No lock and no queue is
    shared, so that one that is killed takes nothing with it.

    :raises UsageError: (by ``wait`` and ``submit``) when a process has died
    """

    def __init__(self, dataset: LFWBatches, workers: int, start_method: str | None) -> None:
        context: Any = multiprocessing.get_context(start_method)
        self._pending: dict[int, Assembly] = {}
        self._submitted = 0
        self._workers: list[tuple[Any, Any]] = []  # process, pipe
        # Buffers that the workers have mapped: those that they were given and that still exist.
        self._known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        try:
            for number in range(workers):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(theirs, dataset), name=f"fast-loader-{number}", daemon=True
                )
                process.start()
                theirs.close()
                self._workers.append((process, ours))
        except BaseException:
            self.close()
            raise

    def submit(self, assembly: Assembly) -> None:
        key, lease = assembly.key, assembly.lease
        if not assembly.missing:
            return
        number, self._submitted = self._submitted, self._submitted + 1
        self._pending[number] = assembly
        shape = None if lease.number in self._known else tuple(lease.memory.shape)
        self._known[lease.number] = lease.memory
        known = set(self._known)
        parts = np.array_split(np.arange(len(key.samples)), len(self._workers))
        # The first parts are the larger ones, and should not always be the same worker's.
        first = number % len(self._workers)
        for (process, pipe), part in zip(self._workers[first:] + self._workers[:first], parts, strict=True):
            part_key = BatchKey(key.epoch, key.samples[part])
            try:
                pipe.send((number, lease.number, shape, known, part_key, int(part[0]) if len(part) else 0))
                if shape is not None:  # by the pipe too: what is never received is closed with it
                    send_handle(pipe, lease.memory.untyped_storage()._share_fd_cpu_()[0], process.pid)
            except OSError as error:
                raise _death(process) from error

    def wait(self, assembly: Assembly) -> None:
        while assembly.missing:
            pipes: dict[Any, Any] = {pipe: process for process, pipe in self._workers}
            ready: Any
            for ready in multiprocessing.connection.wait(list(pipes)):
                try:
                    number, done, start, skipped, error = ready.recv()
                except (EOFError, OSError) as lost:
                    raise _death(pipes[ready]) from lost
                filled = self._pending[number]
                filled.skipped += skipped
                filled.errors += [] if error is None else [(start, error)]
                filled.missing -= done
                if not filled.missing:
                    del self._pending[number]

    def close(self) -> None:
        for process, _ in self._workers:
            process.kill()  # SIGTERM might still meet a handler that came over with the fork
        for process, pipe in self._workers:
            process.join()
            process.close()
            pipe.close()
        self._workers.clear()
        self._pending.clear()


def _serve(pipe: Any, dataset: LFWBatches) -> None:
    """A process's life: fill the parts of batches that come through the pipe."""
    parent = os.getppid()  # the one that made us, or its fork server, which ends with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too, but it is the parent that decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    buffers: dict[int, npt.NDArray[np.uint8]] = {}
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            while not pipe.poll(PARENT_CHECK_S):
                if os.getppid() != parent:
                    return
            number, buffer, shape, known, key, start = pipe.recv()
            for gone in buffers.keys() - known:
                del buffers[gone]
            if shape is not None:
                buffers[buffer] = _map(recv_handle(pipe), shape)
            n = len(key.samples)
            if not n:
                continue
            skipped, error = _fill(dataset, buffers[buffer][start : start + n], key, 0, n)
            if error is not None and not isinstance(error, UsageError):
                # the program's own: with the place where it was
                error = RuntimeError(f"in a loader process:\n{''.join(traceback.format_exception(error))}")
            pipe.send((number, n, start, [start + place for place in skipped], error))


def _map(descriptor: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """The shared memory behind a file descriptor, which this closes."""
    with open(descriptor, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), math.prod(shape)), np.uint8).reshape(shape)


def _death(process: Any) -> UsageError:
    process.join(timeout=1)
    code = process.exitcode
    reason = f"exit status {code}"
    if code is not None and code < 0:
        number = signal.Signals(-code)
        reason = f"{number.name}: {KILLED_BY[number]}" if number in KILLED_BY else number.name
    return UsageError(f"loader process {process.name} (pid {process.pid}) died of {reason}")
