"""ddp/sharded/zero1.py to zero3.py: each stage of the staircase, without what protects it, trains as torch's DDP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp.all_reduce.backend import Backend, another_group
from ddp.sharded.zero1 import ZeRO1
from ddp.sharded.zero2 import ZeRO2
from ddp.sharded.zero3 import ZeRO3
from tests.ddp.by_hand.programs import Program
from tests.ddp.by_hand.wrappers import Case, Results, first_difference, kept
from tests.ddp.sharded.trained import WholeRun, units_of
from tests.support.ranks import run_in_group
from tests.support.zoo.named import UNUSED

STAIRCASE: tuple[type[ZeRO1], ...] = (ZeRO1, ZeRO2, ZeRO3)
# Sizes that ranks and vectors do not divide, frozen layers, units that are computed again in backward, and BatchNorm.
MODELS = ("odd", "frozen", "checkpoint", "segment", "images")
ACTIONS = (("keep_gradients", 1), ("clip", 1), ("evaluate", 1), ("accumulate", 2)) * 2


class BareRun(WholeRun):
    """A run of a wrapper that cannot show whole parameters; its outputs and norms are compared."""

    def _backward(self, loss: Tensor) -> Iterator[Results]:
        yield from super()._backward(loss)
        if isinstance(self._model, ZeRO1):
            # no_sync sends nothing: the shards have no gradients yet.
            alone = not self._model._synchronizes
            assert all((parameter.grad is None) == alone for parameter in self._model.parameters())
            assert all(flat.is_whole == (self._model.stage < 3) for flat in self._model.flats)

    def _state(self) -> Results:
        return {}

    def close(self) -> None:
        """Look at what is held, and close."""
        assert isinstance(self._model, ZeRO1)
        for flat in self._model.flats:
            assert flat.is_whole == (self._model.stage < 3)
            assert (flat.gradient is None) == (self._model.stage > 1)
        super().close()


def as_torchs(model: str, kind: type[ZeRO1]) -> None:
    def stair(network: nn.Module, **_: Any) -> ZeRO1:
        whole = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
        assert dist.group.WORLD is not None
        collectives = Backend(another_group(dist.group.WORLD)), Backend(another_group(dist.group.WORLD))
        units = units_of(network)
        sharded = kind(network, units[:-1], collectives)
        own = sum(parameter.numel() for parameter in sharded.parameters())
        assert own <= whole / dist.get_world_size() + 16 * len(units)
        return sharded

    for optimizer in ("momentum", "adamw"):
        case = Case(model, find_unused=model in UNUSED, broadcast_buffers=False, optimizer=optimizer)
        ours, theirs = (BareRun(engine, Program(case, ACTIONS)) for engine in (stair, DistributedDataParallel))
        found = first_difference(list(kept(ours.run())), kept(theirs.run()), 1e-5)
        assert found is None, found
        ours.close()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", STAIRCASE)
@pytest.mark.parametrize("model", MODELS)
def test_the_staircase_alone_trains_as_torchs_ddp(model: str, kind: type[ZeRO1], ranks: int) -> None:
    """Each stage by itself, without protection, trains as torch's DDP, with accumulation, clipping and checkpoints.

    Claim (ddp/sharded/README.md): without what protects it, each stage trains as torch's DDP.
    Claim (ddp/sharded/README.md, 3): accumulation with and without `no_sync` is that of torch's DDP.
    """
    run_in_group(as_torchs, ranks, model, kind)
