"""One training program, with replicas and with each stage of sharding, compared step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ddp.by_hand.wrapper import HandwrittenDistributedDataParallel
from ddp.sharded import clip_grad_norm_, shard
from ddp.sharded.zero1 import ZeRO1
from tests.ddp.by_hand.programs import Program, Run, whole
from tests.ddp.by_hand.wrappers import Results, first_difference, kept


@dataclass(frozen=True)
class Sharding:
    """:param units: whether each child that has parameters is a unit; else there is the root only"""

    stage: int
    units: bool = True
    all_reduce: str = "backend"

    def __call__(self, network: nn.Module, **_: Any) -> Any:
        return shard(network, self.stage, units=units_of(network) if self.units else [], all_reduce=self.all_reduce)


def units_of(network: nn.Module) -> list[nn.Module]:
    """The innermost modules of lists and sequences, and direct children, that have parameters."""
    units: list[nn.Module] = []
    for child in network.children():
        parts = list(child.children()) if isinstance(child, nn.ModuleList | nn.Sequential) else [child]
        units += [part for part in parts if next(part.parameters(), None) is not None and part not in units]
    return units


def weights(model: Any) -> dict[str, Tensor]:
    """The whole parameters and all buffers, by name."""
    with whole(model) as module:
        named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        return {n: getattr(t, "full_tensor", t.clone)().detach().clone().contiguous() for n, t in named}


class WholeRun(Run):
    """A run of which outputs and whole weights are compared; gradients are not, since each rank may have a shard of them."""

    def _backward(self, loss: Tensor) -> Iterator[Results]:
        loss.backward()
        yield {"loss": loss}

    def _clip(self, most: float) -> Tensor:
        clip = clip_grad_norm_ if isinstance(self._model, ZeRO1) else nn.utils.clip_grad_norm_
        return clip(self._model.parameters(), most)

    def _gradients(self) -> Results:
        return {}

    def _state(self) -> Results:
        return dict(weights(self._model))

    def close(self) -> None:
        getattr(self._model, "close", lambda: None)()


def compare(program: Program, sharding: Sharding, tolerance: float) -> str | None:
    """Where a program on shards first differs from the same one on replicas, or None."""
    ours, theirs = WholeRun(sharding, program), WholeRun(HandwrittenDistributedDataParallel, program)
    difference = first_difference(list(kept(ours.run())), kept(theirs.run()), tolerance)
    ours.close()
    return difference and f"{program}, {sharding}: {difference}"
