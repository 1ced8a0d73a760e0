"""The process group's own all-reduce, which the hand-written DDP uses unless it is given another."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ddp.all_reduce.base import Pending, require_flat
from ddp.all_reduce.sharded import ShardedAllReduce

# Their names since torch 2.15, and before.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def another_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The same ranks with connections and an order of collectives of their own, and the same timeout. A collective."""
    timeout = group._get_backend(group._device_types[0]).options._timeout
    ranks = dist.get_process_group_ranks(group)
    other = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    assert isinstance(other, dist.ProcessGroup)
    return other


class Backend(ShardedAllReduce):
    """``dist.all_reduce``, and a reduce-scatter and an all-gather alone: over TCP with gloo, over NVLink or the network with NCCL.

    gloo's reduce-scatter is a whole all-reduce of a copy, so it moves twice the bytes that it must (torch 2.15,
    torch/csrc/distributed/c10d/ProcessGroupGloo.cpp).

    :param group: the default group when None
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def run(self, buffer: Tensor) -> None:
        self.start(buffer).wait()

    def start(self, buffer: Tensor) -> Pending:
        require_flat(buffer)
        return _pending(dist.all_reduce(buffer, group=self._group, async_op=True))

    def reduce_scatter(self, buffer: Tensor) -> None:
        self.start_reduce_scatter(buffer).wait()

    def start_reduce_scatter(self, buffer: Tensor) -> Pending:
        return _pending(_reduce_scatter(self._own(buffer), buffer, group=self._group, async_op=True))

    def all_gather(self, buffer: Tensor) -> None:
        self.start_all_gather(buffer).wait()

    def start_all_gather(self, buffer: Tensor) -> Pending:
        return _pending(_all_gather(buffer, self._own(buffer), group=self._group, async_op=True))

    def close(self) -> None:
        """Nothing is its own: the process group has the connections."""

    def _own(self, buffer: Tensor) -> Tensor:
        return buffer.chunk(dist.get_world_size(self._group))[dist.get_rank(self._group)]


def _pending(work: dist.Work | None) -> Pending:
    assert work is not None
    return work
