"""What the hand-written DDP asks of an all-reduce: memory for its buckets, and their sum, now or in the background."""

from __future__ import annotations

import abc
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """An all-reduce that was started."""

    def wait(self) -> Any:
        """Return when the tensor holds the sum.

        :raises RankLost: when a rank was lost before
        """


class AllReduce(abc.ABC):
    """Sums tensors over the ranks of a group, in place, as ``dist.all_reduce`` does.

    All ranks call it in the same order with tensors of the same size and dtype: 1-d and contiguous.
    """

    def __init__(self) -> None:
        # One thread runs all sums in the order of their start, the same on every rank, as torch's process groups do.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="all-reduce")

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros ``[numel]`` for a buffer that will be summed many times, in the memory where that is fastest."""
        return torch.zeros(numel, dtype=dtype, device=device)

    @abc.abstractmethod
    def run(self, buffer: Tensor) -> None:
        """Sum ``buffer`` over the ranks.

        :raises RankLost: naming the rank that ended or did not answer in time
        """

    def start(self, buffer: Tensor) -> Pending:
        """Begin to sum ``buffer``, after all sums that were started before."""
        return _InThread(self._thread.submit(self.run, buffer))

    def close(self) -> None:
        """Free threads, connections and memory; tensors of :meth:`allocate` must not be used afterwards."""
        self._thread.shutdown()


class SlicedAllReduce(AllReduce):
    """An all-reduce whose two halves can be used alone, for ranks that each keep one slice of a tensor.

    A tensor of p equal slices lies on each of p ranks; slice r belongs to rank r. A reduce-scatter leaves each rank the sum of
    its own slice. An all-gather gives each rank the slices of the others. One after the other they are an all-reduce, and
    each moves half of its bytes: n(p-1)/p of n. Both work in place.
    """

    @abc.abstractmethod
    def reduce_scatter(self, buffer: Tensor) -> None:
        """Sum this rank's slice over the ranks. The other slices hold nothing of use afterwards.

        :param buffer: ``[p * s]``, contiguous
        :raises RankLost: naming the rank that ended or did not answer in time
        """

    @abc.abstractmethod
    def all_gather(self, buffer: Tensor) -> None:
        """Fill in the slices of the other ranks.

        :param buffer: ``[p * s]``, contiguous, of which this rank's slice counts
        :raises RankLost: naming the rank that ended or did not answer in time
        """

    def start_reduce_scatter(self, buffer: Tensor) -> Pending:
        """Begin a :meth:`reduce_scatter`, after all that was started before."""
        return _InThread(self._thread.submit(self.reduce_scatter, buffer))

    def start_all_gather(self, buffer: Tensor) -> Pending:
        """Begin an :meth:`all_gather`, after all that was started before."""
        return _InThread(self._thread.submit(self.all_gather, buffer))


class _InThread:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()
