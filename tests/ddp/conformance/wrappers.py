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


class _OnRank1(DistributedDataParallel):
    """Rank 1 does something before each forward pass."""

    def act(self) -> None:
        raise NotImplementedError

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            self.act()
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]


class HangsOnRank1(_OnRank1):
    """Rank 1 never comes back."""

    def act(self) -> None:
        time.sleep(600)


class RefusesOnRank1(_OnRank1):
    """Rank 1 raises an error, and rank 0 waits for it."""

    def act(self) -> None:
        raise ValueError("not on\nthis rank")


class DiesOnRank1(_OnRank1):
    """Rank 1's process ends."""

    def act(self) -> None:
        os._exit(7)


class LeavesACollective(DistributedDataParallel):
    """Rank 0 calls one collective more than the others."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        if dist.get_rank() == 0:
            dist.all_reduce(next(module.parameters()).detach().clone(), async_op=True)


class Talks(_OnRank1):
    """Rank 1 prints and warns."""

    def act(self) -> None:
        warnings.warn("a warning", stacklevel=1)
        print("a line")


class AveragesNothing(nn.Module):
    """Calls the module, and does no more."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.forward = module.forward


class Asserts(AveragesNothing):
    """Ends in an assertion without words."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        assert dist.get_world_size() == 1


class KnowsNoOption(DistributedDataParallel):
    """torch's, without its options."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
