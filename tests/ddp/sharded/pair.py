"""One model sharded, and the same one plain on the samples of all ranks, which is one process's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.sharded import shard

STAGES = (1, 2, 3)
Model = Any


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 3))


def inputs(number: int, ranks: Iterable[int] | None = None) -> Tensor:
    """The samples of these ranks, or of this one, in a step: ``[4 * ranks, 5]``."""
    parts = [dist.get_rank()] if ranks is None else ranks
    return torch.cat([torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + rank)) for rank in parts])


class Pair:
    """The same model twice: sharded, and plain on the samples of all ranks, which is one process's."""

    def __init__(
        self,
        stage: int,
        build: Callable[[], nn.Module] = network,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
        layers_are_units: bool = False,
        **settings: Any,
    ) -> None:
        self.net: Any = build()
        self.plain: Any = build()
        units: list[nn.Module] = [part for part in self.net.children() if isinstance(part, nn.Sequential)]
        if layers_are_units:
            units = [part for part in self.net.modules() if isinstance(part, nn.Linear)]
        self.model: Model = shard(self.net, stage, units=units, **settings)
        self.all_ranks = range(dist.get_world_size())
        self.optimizers = [optimizer(one.parameters(), lr=0.05) for one in (self.model, self.plain)]

    @property
    def both(self) -> list[tuple[Model, Iterable[int] | None]]:
        return [(self.model, None), (self.plain, self.all_ranks)]

    def step(self, number: int, before: Callable[[], None] = lambda: None) -> None:
        """:param before: called between the backward pass and the optimizer's step"""
        for model, ranks in self.both:
            model(inputs(number, ranks)).square().mean().backward()
        before()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def halve(self) -> None:
        """Write to a whole parameter."""
        for net in (self.net, self.plain):
            net[2].weight.data.mul_(0.5)

    def check(self) -> None:
        """The outputs of both are the same, and the parameters."""
        with torch.no_grad():
            outputs, expected = self.model(inputs(99)), self.plain(inputs(99))
        torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
        with self.model.gathered() as module:
            torch.testing.assert_close(module.state_dict(), self.plain.state_dict(), rtol=1e-5, atol=1e-5)
