"""What several mutants are made of."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from ddp.by_hand.naive import NaiveDistributedDataParallel


class AnyOptions(NaiveDistributedDataParallel):
    """The naive wrapper; it takes all options of torch's, and follows none."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module)

    def used(self) -> list[bool]:
        """Which parameters have a gradient on this rank."""
        return [parameter.grad is not None for parameter in self.module.parameters()]

    def keep(self, receivers: list[bool]) -> None:
        """Drop the gradients of all other parameters."""
        for parameter, receives in zip(self.module.parameters(), receivers, strict=True):
            if not receives:
                parameter.grad = None


def users(used: list[bool]) -> list[int]:
    """How many ranks use each parameter."""
    everywhere: list[list[bool]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, used)
    return [sum(flags) for flags in zip(*everywhere, strict=True)]
