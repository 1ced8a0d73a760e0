"""ddp/sharded/zero1.py to zero3.py: each stage of the staircase, without what protects it, trains as torch's DDP."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp.all_reduce.backend import Backend, another_group
from ddp.sharded.clip import clip_grad_norm_
from ddp.sharded.zero1 import ZeRO1
from ddp.sharded.zero2 import ZeRO2
from ddp.sharded.zero3 import ZeRO3
from tests.support.ranks import run_in_group

STAIRCASE: tuple[type[ZeRO1], ...] = (ZeRO1, ZeRO2, ZeRO3)


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def mlp() -> nn.Module:
    """Sizes that ranks and vectors do not divide, a frozen layer, and a unit that is computed again in backward."""
    frozen = nn.Linear(7, 7).requires_grad_(False)
    return nn.Sequential(
        nn.Linear(64, 7), frozen, nn.Sequential(nn.Tanh(), nn.Linear(7, 33)), Checkpointed(nn.Linear(33, 5))
    )


class Block(nn.Module):
    """A layer that is used, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(64, 64), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.used(x))


def segment() -> nn.Module:
    """Units that are computed again together: the first of them is needed before its own backward pass begins."""
    return Checkpointed(Block(), Block(), Block(), nn.Linear(64, 5))


def convolutions() -> nn.Module:
    shape, block = nn.Unflatten(1, (1, 8, 8)), nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
    return nn.Sequential(shape, block, nn.Sequential(nn.Conv2d(3, 2, 3, bias=False), nn.Flatten()), nn.Linear(32, 5))


OPTIMIZERS: tuple[Callable[..., torch.optim.Optimizer], ...] = (
    lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-4),
)


def trained(
    network: nn.Module, model: Any, optimizer: torch.optim.Optimizer, clip: Callable[..., Tensor]
) -> list[dict[str, Tensor]]:
    """The outputs and norms of some steps, in which gradients are accumulated and clipped; then of a pass without gradients."""
    results = []
    for step in range(4):
        for micro_step in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro_step + dist.get_rank())
            inputs = torch.randn(6, 64, generator=generator)
            alone = step % 2 == 1 and micro_step == 0
            with model.no_sync() if alone else contextlib.nullcontext():
                model(inputs).square().mean().backward()
            if isinstance(model, ZeRO1):
                # no_sync sends nothing: the shards have no gradients yet.
                assert all((parameter.grad is None) == alone for parameter in model.parameters())
                assert all(flat.is_whole == (model.stage < 3) for flat in model.flats)
        norm = clip(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            results.append({"norm": norm, "outputs": network.eval()(torch.ones(2, 64))})
        network.train()
    return results


def as_torchs(build: Callable[[], nn.Module], kind: type[ZeRO1]) -> None:
    for optimizer in OPTIMIZERS:
        torch.manual_seed(dist.get_rank())  # rank 0's values are sent to all
        network = build()
        replica = DistributedDataParallel(
            copy.deepcopy(network), broadcast_buffers=False, find_unused_parameters=build is segment
        )
        whole = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
        world = dist.group.WORLD
        assert world is not None
        collectives = Backend(another_group(world)), Backend(another_group(world))
        units = [part for part in network.children() if next(part.parameters(), None) is not None]
        model = kind(network, units[:-1], collectives)
        own = sum(parameter.numel() for parameter in model.parameters())
        assert own <= whole / dist.get_world_size() + 16 * len(units)
        expected = trained(replica.module, replica, optimizer(replica.parameters()), nn.utils.clip_grad_norm_)
        actual = trained(network, model, optimizer(model.parameters()), clip_grad_norm_)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        for flat in model.flats:
            assert flat.is_whole == (model.stage < 3)
            assert (flat.gradient is None) == (model.stage > 1)
        model.close()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", STAIRCASE)
@pytest.mark.parametrize("build", [mlp, segment, convolutions])
def test_the_staircase_alone_trains_as_torchs_ddp(
    build: Callable[[], nn.Module], kind: type[ZeRO1], ranks: int
) -> None:
    """Each stage by itself, without protection, trains as torch's DDP, with accumulation, clipping and checkpoints.

    Claim (ddp/sharded/README.md): without what protects it, each stage trains as torch's DDP.
    Claim (ddp/sharded/README.md, 3): accumulation with and without `no_sync` is that of torch's DDP.
    """
    run_in_group(as_torchs, ranks, build, kind)
