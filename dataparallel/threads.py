"""One persistent thread per device, which runs calls with the modes of the calling thread.

torch/nn/parallel/parallel_apply.py starts new threads in every forward pass. Grad mode, autocast and the current stream belong
to a thread, so each call passes them on. A device keeps its thread: CUDA's libraries make a handle and a workspace of some MB for
each pair of a thread and a GPU.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

from dataparallel.devices import current_streams, on_stream

Result = TypeVar("Result")
# Replicas of a wrapper inside another share its DeviceThreads, and may start them together.
_starting = threading.Lock()


class DeviceThreads:
    """Threads for devices of one kind; they start with the first :meth:`run` and end with this object.

    The threads of CPU devices divide the calling thread's intra-op threads (``torch.get_num_threads()``) among them. A copy, a
    pickle and a forked process start their own.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self._pools: list[ThreadPoolExecutor] = []  # of one thread each
        self._owner = 0

    def run(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """Run the i-th call in the i-th device's thread, all at once, with the caller's modes; returns their results.

        :param calls: at most one per device
        :raises Exception: of the first call in their order that failed, after all have ended; its message begins with the
            replica's number and its device
        """
        pools, streams = self._started(), current_streams(self.devices)
        around = _surroundings(self.devices[0].type)

        def run_one(call: Callable[[], Result], stream: torch.cuda.Stream | None) -> Result:
            with around(), on_stream(stream):
                return call()

        running = [
            pool.submit(run_one, call, stream) for pool, call, stream in zip(pools, calls, streams, strict=False)
        ]
        wait(running)
        running.reverse()
        results = []
        for number, device in enumerate(self.devices[: len(calls)]):
            with _naming(f"replica {number} on {device}"):
                # popped: an error keeps this frame alive, so the frame must not keep the error
                results.append(running.pop().result())
        return results

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Limit the calling thread to one CPU device's share of the cores, for its work between calls.

        OpenMP's threads spin for some milliseconds while they wait for more work. Threads that helped the calling thread would
        take the cores from the replicas' threads.
        """
        if self.devices[0].type != "cpu":
            yield
            return
        self._started()  # which divides all that the calling thread has
        with intra_op_threads(share_of_threads(len(self.devices))):
            yield

    def _started(self) -> list[ThreadPoolExecutor]:
        with _starting:
            if self._owner != os.getpid():  # threads do not survive a fork
                self._pools, self._owner = _start(self.devices), os.getpid()
            return self._pools

    def __reduce__(self) -> tuple[Any, ...]:
        return DeviceThreads, (self.devices,)


def _start(devices: Sequence[torch.device]) -> list[ThreadPoolExecutor]:
    share = share_of_threads(len(devices))

    def prepare(device: torch.device) -> None:
        if device.type == "cpu":
            torch.get_num_threads()  # the first call adopts the process's number; after the next line, it would undo that
            torch.set_num_threads(share)
        else:
            # A thread has no CUDA context before its first kernel. A matrix product that comes first finds none, and
            # warns: getCurrentCUDABlasHandle in torch's aten/src/ATen/cuda/CublasHandlePool.cpp.
            torch.zeros(1, device=device)

    pools = [ThreadPoolExecutor(1, f"replica-{number}") for number in range(len(devices))]
    with ThreadPoolExecutor(1) as fresh:
        # Each thread keeps its own number, but the last one set is what new threads begin with.
        number = fresh.submit(torch.get_num_threads).result()
        fresh.submit(_renew_autograd_engine).result()
        prepared = [pool.submit(prepare, device) for pool, device in zip(pools, devices, strict=True)]
        wait(prepared)
        fresh.submit(torch.set_num_threads, number).result()
    for one in prepared:
        one.result()  # raises what a device does not allow
    return pools


def _renew_autograd_engine() -> None:
    """Save a tensor for a backward pass, in a thread that has no modes yet.

    In a forked process, the first thread that does so destroys the inherited engine and makes a new one, without a lock:
    ``get_python_engine`` in torch/csrc/autograd/python_engine.cpp. Threads that do it at the same time crash.
    """
    torch.ones(1, requires_grad=True).exp()


def share_of_threads(devices: int) -> int:
    """Intra-op threads of each of so many CPU devices, which divide the calling thread's."""
    return max(1, torch.get_num_threads() // devices)


@contextlib.contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Set the calling thread's number of intra-op threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


@contextlib.contextmanager
def _naming(place: str) -> Iterator[None]:
    """Put ``place`` before an error's message: in the error itself, or in a RuntimeError where its type does not let it."""
    try:
        yield
    except BaseException as error:
        arguments = error.args
        error.args = (f"{place}: {error}" if str(error) else place,)
        if place in str(error):
            raise
        error.args = arguments
        if not isinstance(error, Exception):  # what stops a program stays what it is
            raise
        raise RuntimeError(f"{place}: {type(error).__name__}: {error}") from error
