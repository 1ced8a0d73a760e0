"""The pools of workers that fill the fast loader's batches: threads, or processes.

Both split each batch into parts, so that all workers fill the first batch together. Threads start at no cost and take the
next part whenever they are free. Processes have a GIL each, which pays if much of the work on an image holds the GIL.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
import traceback
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

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
    :param skipped: positions in the batch without an image
    :param chunks: the threads' parts of it
    :param missing: number of images that processes have not finished
    :param errors: of processes, each with the first position of the part that failed
    """

    key: BatchKey
    handle: BufferHandle
    skipped: list[int] = field(default_factory=list)
    chunks: list[Future[list[int]]] = field(default_factory=list)
    missing: int = 0
    errors: list[tuple[int, BaseException]] = field(default_factory=list)


class ThreadPool:
    """A pool of threads, which decode in parallel because decoders release the GIL.

    Like :class:`ProcessPool`, it fills batches in the background, in the order in which they were submitted. ``wait`` blocks
    until a batch is filled, and raises the error of the first sample that has one; ``close`` ends the workers, and abandons
    batches that are not finished.
    """

    def __init__(self, dataset: LFWBatches, workers: int) -> None:
        self._dataset, self._workers = dataset, workers
        self._threads = ThreadPoolExecutor(workers, "fast-loader")

    def submit(self, pending: PendingBatch) -> None:
        n = len(pending.key.samples)
        size = max(1, min(CHUNK, n // (4 * self._workers)))
        for start in range(0, n, size):
            arguments = pending.handle.pixels, pending.key, start, start + size
            try:
                pending.chunks.append(self._threads.submit(self._dataset.fill, *arguments))
            except RuntimeError as error:
                raise UsageError(f"{self._workers} threads cannot be started: {error}") from error

    def wait(self, pending: PendingBatch) -> None:
        for chunk in pending.chunks:
            pending.skipped += chunk.result()

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


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
        key, handle, pending.missing = pending.key, pending.handle, len(pending.key.samples)
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
        if pending.errors:
            raise min(pending.errors, key=lambda item: item[0])[1]

    def close(self) -> None:
        for process, _ in self._workers:
            process.kill()  # SIGTERM might still be caught by a handler inherited through fork
        for process, pipe in self._workers:
            process.join()
            process.close()
            pipe.close()
        self._workers.clear()
        self._pending.clear()


WorkerPool = ThreadPool | ProcessPool


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
            skipped: list[int] = []
            error: BaseException | None = None
            try:
                skipped = dataset.fill(buffers[buffer][start : start + n], key)
            except UsageError as bad_file:
                error = bad_file
            except BaseException:
                # A program error keeps its traceback, which a pickled exception would lose.
                error = RuntimeError(f"in a loader process:\n{traceback.format_exc()}")
            pipe.send((number, n, start, [start + place for place in skipped], error))


def _map(descriptor: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Map the shared memory of a file descriptor, and close the descriptor."""
    with open(descriptor, "r+b") as file:
        return np.asarray(np.memmap(file, np.uint8, shape=shape))


def _death(process: Any) -> UsageError:
    process.join(timeout=1)
    code = process.exitcode
    reason = f"exit status {code}"
    if code is not None and code < 0:
        number = signal.Signals(-code)
        reason = f"{number.name}: {KILLED_BY[number]}" if number in KILLED_BY else number.name
    return UsageError(f"loader process {process.name} (pid {process.pid}) died of {reason}")
