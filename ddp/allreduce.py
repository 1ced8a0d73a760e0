"""All-reduce by hand: every rank brings a tensor, every rank leaves with the sum.

AllReduce          what the hand-written DDP asks of an algorithm: memory for a bucket, and to sum it, now or in the background
Backend            torch's own: dist.all_reduce, by gloo or NCCL
"""

from __future__ import annotations

import abc
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Pending(Protocol):
    """An all-reduce that is under way; ``torch.distributed.Work`` is one."""

    def wait(self) -> Any:
        """Return when the tensor holds the sum. :raises RuntimeError: if a rank was lost on the way"""


class AllReduce(abc.ABC):
    """Sums tensors over the ranks of a group, in place, as ``dist.all_reduce`` does.

    All ranks call it in the same order with tensors of the same size and dtype: 1-d and contiguous.
    """

    def __init__(self) -> None:
        # One thread, so that what was started first runs first, on every rank: torch's process groups do the same.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="all-reduce")

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros ``[numel]`` for a buffer that will be summed again and again, where that is fastest."""
        return torch.zeros(numel, dtype=dtype, device=device)

    @abc.abstractmethod
    def run(self, buffer: Tensor) -> None:
        """Sum ``buffer`` over the ranks.

        :raises RuntimeError: naming the rank that was lost, when one ended or did not answer in time
        """

    def start(self, buffer: Tensor) -> Pending:
        """Begin to sum ``buffer``, after all that was started before."""
        return _InThread(self._thread.submit(self.run, buffer))

    def close(self) -> None:
        """Give back threads, connections and memory; those of :meth:`allocate` must not be used any more."""
        self._thread.shutdown()


class _InThread:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class Backend(AllReduce):
    """The process group's own all-reduce: over TCP with gloo, over NVLink or the network with NCCL.

    :param group: the default group when None
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self._group = group

    def run(self, buffer: Tensor) -> None:
        dist.all_reduce(buffer, group=self._group)

    def start(self, buffer: Tensor) -> Pending:
        work: Pending = dist.all_reduce(buffer, group=self._group, async_op=True)
        return work
