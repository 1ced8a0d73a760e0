"""Wrappers whose averages are wrong."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Sums(DistributedDataParallel):
    """Adds the gradients and forgets to divide."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: gradient * dist.get_world_size())


MUTANTS: dict[str, Any] = {"gradients_are_the_average_of_the_ranks": Sums}
