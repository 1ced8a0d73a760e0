"""ddp/sharded/by_parameter.py: whole parameters divided over the ranks, as torch's ZeroRedundancyOptimizer divides them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from ddp.by_hand import NaiveDistributedDataParallel
from ddp.sharded.by_parameter import ShardedByParameter, assign
from tests.support.ranks import run_in_group


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 6))
def test_no_rank_has_more_than_its_share_and_one_parameter(sizes: list[int], ranks: int) -> None:
    rank_of = assign(sizes, ranks)
    loads = [sum(size for size, rank in zip(sizes, rank_of, strict=True) if rank == r) for r in range(ranks)]
    assert len(rank_of) == len(sizes)
    assert max(loads) <= sum(sizes) / ranks + max(sizes, default=0)


def trained(kind: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model = NaiveDistributedDataParallel(network)
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    optimizer = (
        ShardedByParameter(network.parameters(), torch.optim.AdamW, **settings)
        if kind == "ours"
        else ZeroRedundancyOptimizer(network.parameters(), torch.optim.AdamW, **settings)
        if kind == "torch's"
        else torch.optim.AdamW(network.parameters(), **settings)
    )
    for step in range(5):
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in network.parameters()]


def test_it_takes_the_steps_of_torchs_and_of_replicas() -> None:
    """ZeRO-1 by parameter takes the steps of ``ZeroRedundancyOptimizer`` and of replicas.

    Claim (ddp/sharded/README.md, 2): sharded by parameter, ZeRO-1 takes the steps of `ZeroRedundancyOptimizer`.
    """
    results = {kind: run_in_group(trained, 2, kind) for kind in ("ours", "torch's", "replicas")}
    for kind in ("torch's", "replicas"):
        for ours, theirs in zip(results["ours"], results[kind], strict=True):
            assert all(map(torch.equal, ours, theirs)), kind


def strided() -> None:
    torch.manual_seed(0)
    memory, gradient = torch.randn(36, 8), torch.randn(36, 4)
    ours, theirs = (nn.Parameter(memory.clone()[:, ::2]) for _ in range(2))
    ours.grad = theirs.grad = gradient
    ShardedByParameter([ours], torch.optim.AdamW, lr=0.1).step()
    torch.optim.AdamW([theirs], lr=0.1).step()
    assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match=r"parameter 0 of shape \[36, 4\] has gaps there"):
        ShardedByParameter([ours], torch.optim.AdamW, fused=True)


def test_a_parameter_with_gaps_in_memory() -> None:
    """A parameter with gaps in memory is optimized and sent element by element, or refused."""
    run_in_group(strided, 2)


def alone() -> int:
    optimizer = ShardedByParameter([nn.Parameter(torch.ones(3))], torch.optim.SGD, lr=0.1)
    optimizer._parameters[0].grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(optimizer._parameters[0], torch.full((3,), 0.9))
    return 0 if optimizer.optimizer is None else 1


def test_a_rank_without_parameters_has_no_optimizer() -> None:
    assert sorted(run_in_group(alone, 2)) == [0, 1]
