"""ddp/by_hand/naive.py: training goes as with torch's DDP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp.by_hand import NaiveDistributedDataParallel
from tests.ddp.by_hand.wrappers import Case, first_difference, recorded
from tests.support.ranks import run_in_group

MODELS = ("images", "channels last", "odd", "tied", "frozen", "sequences", "nested", "checkpoint", "reentrant")
CASES = [
    Case(model, broadcast_buffers=False, steps=3, grad_accumulation_steps=steps, set_to_none=steps == 1, evaluate=True)
    for model in MODELS
    for steps in (1, 3)
]


def naive(module: nn.Module, **_: Any) -> NaiveDistributedDataParallel:
    return NaiveDistributedDataParallel(module)


def compared() -> list[str]:
    """Where the results of training differ from those with torch's DDP."""
    failures = []
    for case in CASES:
        # With three ranks, sums are added in another order: in float64 they differ by little.
        case = case if dist.get_world_size() == 2 else replace(case, dtype=torch.float64)
        ours, theirs = recorded(naive, case), recorded(DistributedDataParallel, case)  # type: ignore[arg-type]
        if differs := first_difference(ours, theirs, 0 if dist.get_world_size() == 2 else 1e-9):
            failures.append(f"{case}: {differs}")
    return failures


@pytest.mark.parametrize("world_size", [2, 3])
def test_trains_as_torch_does(world_size: int) -> None:
    """The naive wrapper trains as torch's DDP.

    Claim (ddp/by_hand/README.md): the naive wrapper trains as torch's DDP.
    """
    for found in run_in_group(compared, world_size):
        assert found == []
