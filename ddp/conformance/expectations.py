"""The expectations of checks. One that a wrapper does not meet is shown with its numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.conformance.check import Wrap, Wrong
from ddp.conformance.networks import layers
from ddp.conformance.steps import Step, alone, average, backward, gradients, inputs, loss_of, of_all_ranks, one_pass


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


def expect_refused(action: Callable[[], Any], what: str) -> None:
    """:raises Wrong: if an action raises no error. That a method or an option is missing is not the error that is meant."""
    error = error_of(action)
    if error is None:
        raise Wrong(f"{what} is accepted")
    if isinstance(error, AttributeError) or "unexpected keyword" in str(error):
        raise error


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


def expect_averages(
    wrap: Wrap, network: nn.Module, steps: Sequence[Step] = (backward, one_pass(1)), **options: Any
) -> None:
    """Wrap a network: each step must leave the averages over the ranks of what it gives without any wrapper.

    :param steps: functions that run forward and backward of what they are given
    :param options: of the wrapper
    :raises Wrong: for another gradient
    """
    own = [alone(network, step) for step in steps]
    expected = list(map(average, own))
    model = wrap(network, **options)
    for number, step in enumerate(steps):
        model.zero_grad()
        step(model)
        expect_same(gradients(network), expected[number], f"step {number}'s gradient", own[number])


def expect_training_of_one_process(wrap: Wrap, steps: Sequence[Sequence[int]], **options: Any) -> None:
    """Optimizer steps with momentum must end with the weights of one process that sees all ranks' samples.

    :param steps: for each, the numbers of its batches; all but the last one are accumulated under ``no_sync``
    :param options: of the wrapper
    :raises Wrong: for another weight
    """
    # Two layers have equal shapes: a wrapper that mixes up their gradients is not told by an error.
    network, single = (layers(3, 3, 3, 2) for _ in range(2))
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
