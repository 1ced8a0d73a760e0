"""One training loop, with replicas and with each stage of sharding, compared step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp.by_hand.wrapper import HandwrittenDistributedDataParallel
from ddp.sharded import shard
from tests.ddp.by_hand.wrappers import OPTIMIZERS, Results, first_difference, kept, run_micro_step
from tests.support.zoo.named import MODELS, UNUSED, batch, tensors


@dataclass(frozen=True)
class Case:
    """A way to train a model.

    :param model: of :data:`tests.support.zoo.named.MODELS`
    :param stage: of sharding; 0 for replicas
    :param units: whether each child that has parameters is a unit; else there is the root only
    :param accumulation: micro-steps, all but the last under ``no_sync``
    """

    model: str
    stage: int = 0
    units: bool = True
    all_reduce: str = "backend"
    accumulation: int = 1
    set_to_none: bool = True
    evaluate: bool = False
    optimizer: str = "momentum"
    steps: int = 6
    dtype: torch.dtype | None = None


def units_of(network: nn.Module) -> list[nn.Module]:
    """The innermost modules of lists and sequences, and direct children, that have parameters."""
    units: list[nn.Module] = []
    for child in network.children():
        parts = list(child.children()) if isinstance(child, nn.ModuleList | nn.Sequential) else [child]
        units += [part for part in parts if next(part.parameters(), None) is not None and part not in units]
    return units


def wrap(network: nn.Module, case: Case) -> Any:
    if case.stage == 0:
        find_unused = case.model in UNUSED
        return HandwrittenDistributedDataParallel(network, broadcast_buffers=False, find_unused_parameters=find_unused)
    units = units_of(network) if case.units else []
    return shard(network, case.stage, units=units, all_reduce=case.all_reduce)


def weights(model: Any) -> dict[str, Any]:
    """The whole parameters and buffers by name."""
    if isinstance(model, HandwrittenDistributedDataParallel):
        return {name: value.clone() for name, value in model.module.state_dict().items()}
    with model.gathered() as module:
        return {name: value.clone() for name, value in module.state_dict().items()}


def train(case: Case) -> Iterator[tuple[str, Results]]:
    torch.manual_seed(dist.get_rank())  # the ranks' models differ, so that the wrapper has to make them one
    network = MODELS[case.model]().to(case.dtype)
    model = wrap(network, case)
    yield "after wrapping", weights(model)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    for step in range(case.steps):
        for micro_step in range(case.accumulation):
            loss = run_micro_step(model, step, micro_step, case.accumulation, case.dtype)
            yield f"loss of step {step}.{micro_step}", {"loss": loss}
        optimizer.step()
        optimizer.zero_grad(set_to_none=case.set_to_none)
        if case.evaluate:
            with torch.no_grad() if step % 2 else torch.inference_mode():
                outputs = model(batch(-step - 1, case.dtype or torch.float32), number=step)
            total = torch.stack([output.double().sum() for output in tensors(outputs)]).sum()
            yield f"evaluation after step {step}", {"sum": total}
    yield "after training", weights(model)
    if case.stage:
        model.close()


def compare(ours: Case, theirs: Case, tolerance: float) -> str | None:
    """Where two ways to train first differ, or None."""
    difference = first_difference(kept(train(ours)), kept(train(theirs)), tolerance)
    return difference and f"{ours}: {difference}"
