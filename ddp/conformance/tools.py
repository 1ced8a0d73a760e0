"""What checks are made of: small networks, this rank's inputs, what a DDP must give, and comparisons that show the numbers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.conformance.check import Wrong

Gradients = list[Tensor | None]
EACH_ALONE = 1e-6  # MiB: as bucket_cap_mb, it gives every parameter a bucket of its own


def layers(*widths: int, seed: int = 0) -> nn.Sequential:
    """Linear layers with Tanh in between; the same on every rank for one seed."""
    torch.manual_seed(seed)
    linear = [nn.Linear(n, m) for n, m in itertools.pairwise(widths)]
    return nn.Sequential(*[module for layer in linear for module in (layer, nn.Tanh())][:-1])


def inputs(number: int = 0, width: int = 3, samples: int = 4) -> Tensor:
    """This rank's ``number``-th batch: ``[samples, width]``, different on every rank."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    return torch.randn(samples, width, generator=generator)


def loss_of(output: Tensor) -> Tensor:
    """A loss whose gradient depends on the output."""
    return output.square().mean()


def backward(model: nn.Module, number: int = 0) -> None:
    """Forward and backward with this rank's ``number``-th batch."""
    loss_of(model(inputs(number))).backward()


def gradients(module: nn.Module) -> Gradients:
    """Copies of all gradients, in the order of the parameters; None where there is none."""
    return [None if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


def alone(network: nn.Module, backward: Callable[[nn.Module], Any] | None = None) -> list[Tensor]:
    """What a backward pass leaves in the gradients of a copy without any wrapper, on this rank alone; zeros for nothing.

    :param backward: forward and backward; of ``loss_of(network(inputs()))`` when None
    """
    network = copy.deepcopy(network)
    network.zero_grad()
    if backward is None:
        loss_of(network(inputs())).backward()
    else:
        backward(network)
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in network.parameters()]


def average(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """The averages over the ranks of a group, which is what a DDP's gradients must be."""
    averages = [tensor.detach().clone() for tensor in tensors]
    for tensor in averages:
        dist.all_reduce(tensor, group=group)
    return [tensor / dist.get_world_size(group) for tensor in averages]


def of_all_ranks(value: Any) -> list[Any]:
    """Every rank's value, in rank order."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def expect(condition: object, message: str) -> None:
    """:raises Wrong: with the message, unless the condition holds"""
    if not condition:
        raise Wrong(message)


def error_of(action: Callable[[], Any]) -> Exception | None:
    """The error that an action raises, which the wrapper is expected to; None if it raises none."""
    try:
        action()
    except Exception as error:  # which type is the wrapper's own choice
        return error
    return None


def expect_refused(action: Callable[[], Any], what: str) -> Exception:
    """:raises Wrong: if an action raises no error. That a method or an option is missing is not the error that is meant."""
    error = error_of(action)
    if error is None:
        raise Wrong(f"{what} is accepted")
    if isinstance(error, AttributeError) or "unexpected keyword" in str(error):
        raise error
    return error


def expect_same(found: Sequence[Tensor | None], expected: Sequence[Tensor | None], what: str = "gradient") -> None:
    """:raises Wrong: naming the first tensor that differs by more than rounding, with the largest difference"""
    expect(len(found) == len(expected), f"{len(found)} {what}s instead of {len(expected)}")
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one is None or other is None:
            expect(one is other, f"{what} {index} is {_shown(one)} instead of {_shown(other)}")
        elif one.shape != other.shape or one.dtype != other.dtype:
            raise Wrong(f"{what} {index} is {_shown(one)} instead of {_shown(other)}")
        elif not torch.allclose(one, other, rtol=1e-5, atol=1e-7, equal_nan=True):
            worst = (one - other).abs().argmax()
            raise Wrong(
                f"{what} {index} is {one.flatten()[worst].item():.6g} instead of {other.flatten()[worst].item():.6g}"
            )


def _shown(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")
