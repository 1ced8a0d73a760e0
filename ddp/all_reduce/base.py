"""The interface of an all-reduce: memory for buckets, and their sum, now or in the background."""

from __future__ import annotations

import abc
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """An all-reduce that was started."""

    def wait(self) -> Any:
        """Return when the tensor holds the sum.

        :raises RuntimeError: when a rank has ended, or did not answer in time
        """


class AllReduce(abc.ABC):
    """Sums tensors over the ranks of a group, in place, as ``dist.all_reduce`` does.

    All ranks call it in the same order with tensors of the same size and dtype: 1-d and contiguous.
    """

    def __init__(self) -> None:
        # One thread runs all sums in the order of their start, the same on every rank, as torch's process groups do.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="all-reduce")
        self._started: list[Future[None]] = []  # the latest

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros ``[numel]`` for a buffer that will be summed many times, in the memory where that is fastest."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def run(self, buffer: Tensor) -> None:
        """Sum ``buffer`` over the ranks, after all sums that were started before.

        :raises RuntimeError: when a rank has ended, or did not answer in time
        :raises ValueError: if it is not 1-d and contiguous
        """
        _require_flat(buffer)
        wait(self._started)
        self._sum(buffer)

    def start(self, buffer: Tensor) -> Pending:
        """Begin to sum ``buffer``, after all sums that were started before.

        :raises ValueError: if it is not 1-d and contiguous
        """
        _require_flat(buffer)
        return self._start(buffer)

    @abc.abstractmethod
    def _sum(self, buffer: Tensor) -> None:
        """The algorithm."""

    def _start(self, buffer: Tensor) -> Pending:
        return self._in_thread(self._sum, buffer)

    def _in_thread(self, collective: Callable[[Tensor], None], buffer: Tensor) -> Pending:
        self._started = [self._thread.submit(collective, buffer)]
        return InThread(self._started[0])

    def close(self) -> None:
        """Free threads, connections and memory; tensors of :meth:`allocate` must not be used afterwards."""
        self._thread.shutdown()


def _require_flat(buffer: Tensor) -> None:
    """Memory is sent, so a column of a matrix would be summed with its neighbors."""
    if buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(
            f"an all-reduce takes a tensor that is 1-d and contiguous, not {list(buffer.shape)} with strides {list(buffer.stride())}: "
            "give it .contiguous().view(-1), and copy the sum back"
        )


class InThread:
    """A sum in the background thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()
