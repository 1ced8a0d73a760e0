"""The parts of checks: small networks, this rank's inputs, what a DDP must give, and comparisons that show the numbers."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.conformance.check import Wrap, Wrong

Gradients = list[Tensor | None]
Step = Callable[[nn.Module], Any]
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


def average(tensors: Sequence[Tensor | None], group: dist.ProcessGroup | None = None) -> list[Any]:
    """The averages over the ranks of a group, which is what a DDP's gradients must be.

    None counts as zeros, and the average is None where all ranks have None.
    """
    by_parameter = [[t for t in column if t is not None] for column in zip(*of_all_ranks(tensors, group), strict=True)]
    return [torch.stack(some).sum(0) / dist.get_world_size(group) if some else None for some in by_parameter]


def expect_averages(
    wrap: Wrap, network: nn.Module, steps: Sequence[Step] = (backward, one_pass(1)), **options: Any
) -> Any:
    """Wrap a network: each step must leave the averages over the ranks of what it gives without any wrapper.

    :param steps: functions that run forward and backward of what they are given
    :param options: of the wrapper
    :returns: the wrapped network
    :raises Wrong: for another gradient
    """
    own = [alone(network, step) for step in steps]
    expected = list(map(average, own))
    model = wrap(network, **options)
    for number, step in enumerate(steps):
        model.zero_grad()
        step(model)
        expect_same(gradients(network), expected[number], f"step {number}'s gradient", own[number])
    return model


def expect_training_of_one_process(wrap: Wrap, steps: Sequence[Sequence[int]], **options: Any) -> None:
    """Optimizer steps with momentum must end with the weights of one process that sees all ranks' samples.

    :param steps: for each, the numbers of its batches; all but the last one are accumulated under ``no_sync``
    :param options: of the wrapper
    :raises Wrong: for another weight
    """
    network, single = (
        layers(3, 3, 3, 2) for _ in range(2)
    )  # of equal shapes, so that none may take another's gradient
    model = wrap(network, **options)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for one in (model, single)]
    for numbers in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        for number in numbers:
            with contextlib.nullcontext() if number == numbers[-1] else model.no_sync():
                backward(model, number)
            loss_of(single(torch.cat(of_all_ranks(inputs(number))))).backward()
        for optimizer in optimizers:
            optimizer.step()
    expect_same(list(network.parameters()), list(single.parameters()), "weight")


def of_all_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The value of every rank of a group, in rank order."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
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


def expect_same(
    actual: Sequence[Tensor | None],
    expected: Sequence[Tensor | None],
    what: str = "gradient",
    own: Sequence[Tensor | None] | None = None,
) -> None:
    """Compare tensors, but for rounding.

    :param own: what this rank computed alone, where ``expected`` are averages: the message says if a value is that, or the sum
    :raises Wrong: naming the first tensor that differs, with the largest difference
    """
    expect(len(actual) == len(expected), f"{len(actual)} {what}s instead of {len(expected)}")
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        if one is None or other is None:
            expect(one is other, f"{what} {index} is {_shown(one)} instead of {_shown(other)}")
        elif one.shape != other.shape or one.dtype != other.dtype:
            raise Wrong(f"{what} {index} is {_shown(one)} instead of {_shown(other)}")
        elif not torch.allclose(one, other, rtol=1e-5, atol=1e-7, equal_nan=True):
            worst = (one - other).abs().argmax()
            raise Wrong(
                f"{what} {index} is {one.flatten()[worst].item():.6g} instead of {other.flatten()[worst].item():.6g}"
                + ("" if own is None else _hint(one, other, own[index]))
            )


def _hint(actual: Tensor, expected: Tensor, own: Tensor | None) -> str:
    if own is not None and torch.allclose(actual, own):
        return ": this is the rank's own, nothing was averaged"
    if torch.allclose(actual, expected * dist.get_world_size()):
        return ": this is the sum over the ranks, not their average"
    return ""


def _shown(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")


@contextlib.contextmanager
def rank_group(firsts: Sequence[int]) -> Iterator[Any]:
    """A block with this rank's process group, when the ranks are divided into groups.

    :param firsts: the first rank of each group, in order
    """
    ends = [*firsts[1:], dist.get_world_size()]
    groups = [dist.new_group(list(range(first, end))) for first, end in zip(firsts, ends, strict=True)]
    mine: Any = groups[sum(dist.get_rank() >= first for first in firsts) - 1]
    try:
        yield mine
    finally:
        dist.destroy_process_group(mine)
