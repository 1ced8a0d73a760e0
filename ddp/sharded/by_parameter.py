"""ZeRO stage 1 in its simplest form: each parameter is optimized by one rank, which sends it to the others.

    model = DistributedDataParallel(network)
    optimizer = ShardedByParameter(network.parameters(), torch.optim.AdamW, lr=0.001)
    model(inputs).sum().backward()
    optimizer.step()

It is right, and the optimizer's state is divided: torch's ``ZeroRedundancyOptimizer`` does the same. But a parameter is the
smallest part. One large embedding makes its rank hold more state than the others, and all wait for its step. And it sends
more than is needed: DDP's all-reduce gives every rank all averages, of which it uses its share. ddp/sharded/zero1.py cuts all
parameters into equal slices instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp.by_hand.replicas import broadcast


def assign(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank of each parameter: from the largest on, each goes to the rank that has the least so far.

    :param sizes: elements of each parameter
    """
    load = [0] * ranks
    rank_of = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank_of[index] = load.index(min(load))
        load[rank_of[index]] += sizes[index]
    return rank_of


class ShardedByParameter:
    """An optimizer of which every rank has the part for its own parameters, over the ranks of the default process group.

    :param parameters: the same on every rank, with the same averaged gradients when :meth:`step` is called
    :param optimizer: its class
    :param settings: what the class takes beside parameters
    :raises ValueError: on every rank, for a fused optimizer of parameters with gaps in memory
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], optimizer: type[torch.optim.Optimizer], **settings: Any
    ) -> None:
        self._parameters = list(parameters)
        for number, p in enumerate(self._parameters):
            if settings.get("fused") and not torch.ops.aten.is_non_overlapping_and_dense(p):
                raise ValueError(
                    f"fused=True walks over memory, and parameter {number} of shape {list(p.shape)} has gaps there: make it "
                    "contiguous, or leave out fused"
                )
        self._rank_of = assign([parameter.numel() for parameter in self._parameters], dist.get_world_size())
        own = [p for p, rank in zip(self._parameters, self._rank_of, strict=True) if rank == dist.get_rank()]
        self.optimizer = optimizer(own, **settings) if own else None  # no optimizer takes an empty list

    @torch.no_grad()
    def step(self) -> None:
        """Optimize this rank's parameters, and get the others'. A collective."""
        if self.optimizer is not None:
            self.optimizer.step()
        for rank in range(dist.get_world_size()):
            of_rank = [p for p, owner in zip(self._parameters, self._rank_of, strict=True) if owner == rank]
            broadcast(of_rank, rank, dist.distributed_c10d._get_default_group())

    def zero_grad(self) -> None:
        """Drop the gradients of all parameters."""
        for parameter in self._parameters:
            parameter.grad = None
