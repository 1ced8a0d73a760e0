"""All-reduces whose reduce-scatter and all-gather can be used alone: what sharded training (ddp/sharded/) lives on."""

from __future__ import annotations

import abc

from torch import Tensor

from ddp.all_reduce.base import AllReduce, Pending


class ShardedAllReduce(AllReduce):
    """A reduce-scatter, then an all-gather, each of which can be used alone by ranks that keep one shard of a tensor.

    A tensor of p equal shards lies on each of p ranks; shard r belongs to rank r. A reduce-scatter leaves each rank the sum of
    its own shard. An all-gather gives each rank the shards of the others. One after the other they are an all-reduce, and
    each moves half of its bytes: n(W-1)/W of n. Both work in place.
    """

    @abc.abstractmethod
    def reduce_scatter(self, buffer: Tensor) -> None:
        """Sum this rank's shard over the ranks. The other shards hold nothing of use afterwards.

        :param buffer: ``[p * s]``, contiguous
        :raises RuntimeError: when a rank has ended, or did not answer in time
        """

    @abc.abstractmethod
    def all_gather(self, buffer: Tensor) -> None:
        """Fill in the shards of the other ranks.

        :param buffer: ``[p * s]``, contiguous, of which this rank's shard counts
        :raises RuntimeError: when a rank has ended, or did not answer in time
        """

    @abc.abstractmethod
    def start_reduce_scatter(self, buffer: Tensor) -> Pending:
        """Begin a :meth:`reduce_scatter`, after all that was started before."""

    @abc.abstractmethod
    def start_all_gather(self, buffer: Tensor) -> Pending:
        """Begin an :meth:`all_gather`, after all that was started before."""
