"""The interface of an all-reduce: memory for buckets, and their sum, now or in the background."""

from __future__ import annotations

import abc
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

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros ``[numel]`` for a buffer that will be summed many times, in the memory where that is fastest."""
        return torch.zeros(numel, dtype=dtype, device=device)

    @abc.abstractmethod
    def run(self, buffer: Tensor) -> None:
        """Sum ``buffer`` over the ranks, after all sums that were started before.

        :raises RuntimeError: when a rank has ended, or did not answer in time
        :raises ValueError: if it is not 1-d and contiguous
        """

    @abc.abstractmethod
    def start(self, buffer: Tensor) -> Pending:
        """Begin to sum ``buffer``, after all sums that were started before.

        :raises ValueError: if it is not 1-d and contiguous
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Free threads, connections and memory; tensors of :meth:`allocate` must not be used afterwards."""


def require_flat(buffer: Tensor) -> None:
    """:raises ValueError: since memory is sent: a column of a matrix would be summed with its neighbors"""
    if buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(
            f"an all-reduce takes a tensor that is 1-d and contiguous, not {list(buffer.shape)} with strides {list(buffer.stride())}: "
            "give it .contiguous().view(-1), and copy the sum back"
        )
