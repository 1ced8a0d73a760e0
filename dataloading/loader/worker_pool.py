"""The pools of workers that fill the fast loader's batches: threads, or processes.

Both split each batch into parts, so that all workers fill the first batch together. Threads start at no cost and take the
next part whenever they are free. Processes have a GIL each, which pays if much of the work on an image holds the GIL.
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
from common.data.loaders import KILLED_BY
from common.errors import UsageError
from dataloading.dataset.batches import LFWBatches
from dataloading.loader.buffers import BufferHandle

CHUNK = 8  # maximum number of images that a thread takes at a time
PARENT_CHECK_S = 5.0


@dataclass(eq=False)
class PendingBatch:
    """A batch that is being filled.

    :param key: the epoch and the samples
    :param handle: the memory to fill
    :param missing: number of images that are not finished
    :param skipped: positions in the batch without an image
    :param errors: each with the first position of the part that failed
    """

    key: BatchKey
    handle: BufferHandle
    missing: int
    skipped: list[int] = field(default_factory=list)
    errors: list[tuple[int, BaseException]] = field(default_factory=list)

    def raise_first(self) -> None:
        """:raises BaseException: the error of the first sample that has one"""
        if self.errors:
            raise min(self.errors, key=lambda item: item[0])[1]


class WorkerPool(Protocol):
    """Fills batches in the background."""

    def submit(self, pending: PendingBatch) -> None:
        """Queue a batch; batches are filled in the order of their submission."""

    def wait(self, pending: PendingBatch) -> None:
        """Block until the batch is filled or has failed."""

    def close(self) -> None:
        """End the workers; batches that are not finished are abandoned."""


class ThreadPool:
    """A pool of threads, which decode in parallel because decoders release the GIL."""

    def __init__(self, dataset: LFWBatches, workers: int) -> None:
        self._dataset, self._workers = dataset, workers
        self._chunks: queue.SimpleQueue[tuple[PendingBatch, int, int] | None] = queue.SimpleQueue()
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

    def submit(self, pending: PendingBatch) -> None:
        n = len(pending.key.samples)
        size = max(1, min(CHUNK, n // (4 * self._workers)))
        for start in range(0, n, size):
            self._chunks.put((pending, start, min(start + size, n)))

    def wait(self, pending: PendingBatch) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not pending.missing)

    def close(self) -> None:
        self._stopping = True
        for _ in self._threads:
            self._chunks.put(None)
        for thread in self._threads:
            thread.join()
        self._chunks = queue.SimpleQueue()  # the rest of the old queue refers to batches' memory

    def _work(self) -> None:
        while (chunk := self._chunks.get()) is not None and not self._stopping:
            pending, start, stop = chunk
            skipped, error = _fill(
                self._dataset, pending.handle.pixels, pending.key, start, stop, lambda: not self._stopping
            )
            with self._changed:
                pending.skipped += skipped
                pending.errors += [] if error is None else [(start, error)]
                pending.missing -= stop - start
                if not pending.missing:
                    self._changed.notify_all()
            del chunk, pending  # an idle thread must not keep a batch's memory in use


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


class ProcessPool:
    """A pool of processes, which write into memory that they share with the main process.

    Each process receives its part of every batch through its own pipe and reports there when the part is filled. They share
    no lock and no queue, so a process that is killed cannot block the others.

    :raises UsageError: (by ``wait`` and ``submit``) when a process has died
    """

    def __init__(self, dataset: LFWBatches, workers: int, start_method: str | None) -> None:
        context: Any = multiprocessing.get_context(start_method)
        self._pending: dict[int, PendingBatch] = {}
        self._submitted = 0
        self._workers: list[tuple[Any, Any]] = []  # process, pipe
        # Buffers that the workers have mapped: those that were sent to them and still exist.
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

    def submit(self, pending: PendingBatch) -> None:
        key, handle = pending.key, pending.handle
        if not pending.missing:
            return
        number, self._submitted = self._submitted, self._submitted + 1
        self._pending[number] = pending
        shape = None if handle.number in self._known else tuple(handle.memory.shape)
        self._known[handle.number] = handle.memory
        known = set(self._known)
        parts = np.array_split(np.arange(len(key.samples)), len(self._workers))
        # array_split makes the first parts larger; rotating them shares this work evenly.
        first = number % len(self._workers)
        for (process, pipe), part in zip(self._workers[first:] + self._workers[:first], parts, strict=True):
            part_key = BatchKey(key.epoch, key.samples[part])
            try:
                pipe.send((number, handle.number, shape, known, part_key, int(part[0]) if len(part) else 0))
                if (
                    shape is not None
                ):  # sent through the pipe, so a descriptor that is never received is closed with the pipe
                    send_handle(pipe, handle.memory.untyped_storage()._share_fd_cpu_()[0], process.pid)
            except OSError as error:
                raise _death(process) from error

    def wait(self, pending: PendingBatch) -> None:
        while pending.missing:
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
            process.kill()  # SIGTERM might still be caught by a handler inherited through fork
        for process, pipe in self._workers:
            process.join()
            process.close()
            pipe.close()
        self._workers.clear()
        self._pending.clear()


def _serve(pipe: Any, dataset: LFWBatches) -> None:
    """The main loop of a process: fill the parts of batches that come through the pipe."""
    parent = os.getppid()  # the main process, or its fork server, which ends with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, but only the parent handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    buffers: dict[int, npt.NDArray[np.uint8]] = {}
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has ended
        while True:
            while not pipe.poll(PARENT_CHECK_S):
                if os.getppid() != parent:
                    return
            number, buffer, shape, known, key, start = pipe.recv()
            for gone in buffers.keys() - known:  # the main process has freed them
                del buffers[gone]
            if shape is not None:
                buffers[buffer] = _map(recv_handle(pipe), shape)
            n = len(key.samples)
            if not n:
                continue
            skipped, error = _fill(dataset, buffers[buffer][start : start + n], key, 0, n)
            if error is not None and not isinstance(error, UsageError):
                # A program error keeps its traceback, which a pickled exception would lose.
                error = RuntimeError(f"in a loader process:\n{''.join(traceback.format_exception(error))}")
            pipe.send((number, n, start, [start + place for place in skipped], error))


def _map(descriptor: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Map the shared memory of a file descriptor, and close the descriptor."""
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
