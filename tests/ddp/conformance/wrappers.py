"""Wrappers that do something that the command must survive."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NUMBER = 3


class HangsOnRank1(DistributedDataParallel):
    """Rank 1 never comes back."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(600)
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]


class RefusesOnRank1(DistributedDataParallel):
    """Rank 1 raises an error, and rank 0 waits for it."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("not on\nthis rank")
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]


class DiesOnRank1(DistributedDataParallel):
    """Rank 1's process ends."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            os._exit(7)
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]


class LeavesACollective(DistributedDataParallel):
    """Rank 0 calls one collective more than the others."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        if dist.get_rank() == 0:
            dist.all_reduce(next(module.parameters()).detach().clone(), async_op=True)


class Talks(DistributedDataParallel):
    """Prints and warns."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        warnings.warn("a warning", stacklevel=1)
        print("a line")
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
