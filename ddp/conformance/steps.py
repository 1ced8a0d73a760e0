"""The steps of checks: this rank's batches, forward and backward with them, and the averages that a DDP must come to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Gradients = list[Tensor | None]
Step = Callable[[nn.Module], Any]
EACH_ALONE = 1e-6  # MiB: as bucket_cap_mb, it gives every parameter a bucket of its own


def inputs(number: int = 0, width: int = 3, samples: int = 4) -> Tensor:
    """This rank's ``number``-th batch: ``[samples, width]``, different on every rank."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    return torch.randn(samples, width, generator=generator)


def loss_of(output: Tensor) -> Tensor:
    """A loss whose gradient depends on the output."""
    return output.square().mean()


def one_pass(number: int = 0, *arguments: Any) -> Step:
    """Forward and backward with this rank's ``number``-th batch, and with other arguments of the module after it."""

    def forward_and_backward(model: nn.Module) -> None:
        loss_of(model(inputs(number), *arguments)).backward()

    return forward_and_backward


def backward(model: nn.Module, number: int = 0) -> None:
    """Forward and backward with this rank's ``number``-th batch."""
    one_pass(number)(model)


def passes(*numbers: int) -> Step:
    """Forward and backward with each of these batches, one after another: gradients add up."""

    def one_after_another(model: nn.Module) -> None:
        for number in numbers:
            backward(model, number)

    return one_after_another


def gradients(module: nn.Module) -> Gradients:
    """Copies of all gradients, in the order of the parameters; None where there is none."""
    return [None if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


def alone(network: nn.Module, step: Step = backward) -> list[Any]:
    """The gradients that forward and backward leave in a copy without any wrapper, on this rank alone; None where there is none."""
    network = copy.deepcopy(network)
    network.zero_grad()
    step(network)
    return gradients(network)


def of_all_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The value of every rank of a group, in rank order."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def average(tensors: Sequence[Tensor | None], group: dist.ProcessGroup | None = None) -> list[Any]:
    """The averages over the ranks of a group, which is what a DDP's gradients must be.

    None counts as zeros, and the average is None where all ranks have None.
    """
    by_parameter = [[t for t in column if t is not None] for column in zip(*of_all_ranks(tensors, group), strict=True)]
    return [torch.stack(some).sum(0) / dist.get_world_size(group) if some else None for some in by_parameter]
