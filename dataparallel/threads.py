"""A thread per device that stays, and runs on it what the calling thread would have run.

torch/nn/parallel/parallel_apply.py starts its threads anew in every forward pass. What a thread is told by its caller (grad
mode, autocast, the current stream) belongs to the thread, so it is handed over with each call.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class DeviceThreads:
    """Threads for devices of one kind; they start with the first :meth:`run` and end with this object.

    The threads of CPU devices divide the calling thread's intra-op threads (``torch.get_num_threads()``) among them. A copy, a
    pickle and a forked process start their own.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self._pool: ThreadPoolExecutor | None = None
        self._owner = 0

    def run(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """Run the i-th call in the i-th device's surroundings, all at once; returns their results.

        :param calls: at most one per device
        :raises Exception: of the first call in their order that failed, after all have ended; its message begins with the
            replica's number and its device
        """
        if self._pool is None or self._owner != os.getpid():  # threads do not survive a fork
            self._pool, self._owner = _start(len(self.devices), self.devices[0].type == "cpu"), os.getpid()
        around = _surroundings(self.devices[0].type)
        streams = [torch.cuda.current_stream(d) if d.type == "cuda" else None for d in self.devices]

        def run_one(call: Callable[[], Result], stream: torch.cuda.Stream | None) -> Result:
            with around(), torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                return call()

        running = [self._pool.submit(run_one, call, stream) for call, stream in zip(calls, streams, strict=False)]
        wait(running)
        for number, future in enumerate(running):
            error = future.exception()
            if error is not None:
                raise _named(error, f"replica {number} on {self.devices[number]}")
        return [future.result() for future in running]

    def __reduce__(self) -> tuple[Any, ...]:
        return DeviceThreads, (self.devices,)


def _start(count: int, divide_cores: bool) -> ThreadPoolExecutor:
    total = torch.get_num_threads()
    all_there = threading.Barrier(count + 1)

    def prepare() -> None:
        if divide_cores:
            torch.set_num_threads(max(1, total // count))
        all_there.wait()

    pool = ThreadPoolExecutor(count, "replica")
    started = [pool.submit(prepare) for _ in range(count)]
    all_there.wait()
    wait(started)
    torch.set_num_threads(
        total
    )  # each thread keeps its own number, but the last one set is what new threads begin with
    return pool


def _surroundings(kind: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """The calling thread's modes, for another thread."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    cache = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        autocast = torch.autocast(kind, dtype, enabled=enabled, cache_enabled=cache)
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), autocast:
            yield

    return around


def _named(error: BaseException, place: str) -> BaseException:
    """The error, of its own type where its message can be changed, with where it happened before the message."""
    message = f"{place}: {error}"
    error.args = (message, *error.args[1:])
    if place in str(error):
        return error
    other = RuntimeError(f"{place}: {type(error).__name__}: {error}")
    other.__cause__ = error
    return other
