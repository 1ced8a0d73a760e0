"""Random modules and nested arguments, and the comparison of a wrapper with the plain module."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from dataparallel.parallel import HandwrittenDataParallel
from tests.support.zoo.named import loss_of, tensors
from tests.support.zoo.random_models import CHANNELS, LAYOUTS, PER_SAMPLE, SIDE, Part, build

CPU = torch.device("cpu")


def assert_same(actual: Any, expected: Any) -> None:
    """Equal tensors in containers of equal types; everything else exactly equal."""
    (ours, our_structure), (theirs, structure) = tree_flatten(actual), tree_flatten(expected)
    assert our_structure == structure
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other)
            assert one.requires_grad == other.requires_grad
        else:
            assert one == other


def outcome(forward: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The outputs, and the gradients of parameters, buffers and arguments."""
    args, kwargs = copy.deepcopy((args, kwargs))
    outputs = forward(*args, **kwargs)
    loss_of(outputs).backward()
    module = forward.module if isinstance(forward, HandwrittenDataParallel | nn.DataParallel) else forward
    assert isinstance(module, nn.Module)
    own = dict([*module.named_parameters(), *module.named_buffers()])
    gradients = {name: tensor.grad for name, tensor in own.items()}
    return outputs, gradients, [tensor.grad for tensor in tensors((args, kwargs))]


def gradients(module: nn.Module) -> list[Tensor | None]:
    """The gradients of its parameters."""
    return [parameter.grad for parameter in module.parameters()]


def wrapped(module: nn.Module, count: int, dim: int = 0) -> HandwrittenDataParallel:
    return HandwrittenDataParallel(module, ["cpu"] * count, dim)


def assert_equal_to_plain(module: nn.Module, count: int, *args: Any, dim: int = 0, **kwargs: Any) -> None:
    """Compare the outputs and all gradients on ``count`` CPU devices with the plain module's."""
    expected = outcome(copy.deepcopy(module), *args, **kwargs)
    assert_same(outcome(wrapped(module, count, dim), *args, **kwargs), expected)


def rows(samples: int, width: int = 3, seed: int = 0, requires_grad: bool = True) -> Tensor:
    """Random float64 ``[samples, width]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, width, generator=generator, dtype=torch.float64).requires_grad_(requires_grad)


def linear(inputs: int = 3, outputs: int = 2) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(inputs, outputs).double()


# Random models: layers of the zoo that treat each sample by itself, [n, CHANNELS, SIDE, SIDE] to the same


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(SIDE, SIDE), linear(SIDE, SIDE)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.tanh(self.first(x)))


class Buffers(nn.Module):
    """A constant, a trainable buffer, and a counter that changes after autograd has saved the constant."""

    mask: Tensor
    counter: Tensor
    learned: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.randn(4))
        self.register_buffer("counter", torch.zeros(1), persistent=False)
        self.register_buffer("learned", torch.randn(4, dtype=torch.float64, requires_grad=True))

    def forward(self, x: Tensor) -> Any:
        x = x * self.mask + self.learned
        self.counter += 1
        return x


def layer(part: Part | type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    if not isinstance(part, Part):
        return part()
    module = build(part, torch.float64)
    for parameter in list(module.parameters())[-1:] if part.frozen else ():
        parameter.requires_grad_(False)
    return module


class Along(nn.Module):
    """Layers whose sample dimension is not the first."""

    def __init__(self, layers: Sequence[nn.Module], dim: int) -> None:
        super().__init__()
        self.layers, self.dim = nn.Sequential(*layers), dim

    def forward(self, x: Tensor) -> Any:
        return self.layers(x.movedim(self.dim, 0) * 1).movedim(0, self.dim)


def random_model(layers: Sequence[nn.Module], dim: int) -> nn.Module:
    """A sequence of these layers, and then the first again with the same weights."""
    return Along([*layers, layers[0]], dim)


parts = st.builds(
    Part,
    st.sampled_from(PER_SAMPLE),
    st.sampled_from([0, 1, 6, 7]),  # those whose tensors can be copied: no weight that a hook has left behind
    st.sampled_from(sorted(LAYOUTS)),
    st.booleans(),
)
layers = (parts | st.sampled_from([Tied, Buffers])).map(layer)
# Hypothesis prefers the first value: an odd case, not the trivial one.
device_counts = st.sampled_from([3, 2, 4, 1])
batch_sizes = st.sampled_from([5, 1, 2, 3, 4, 6, 7, 8, 9])
random_models = st.builds(
    random_model, st.lists(layers, min_size=1, max_size=5), st.shared(st.sampled_from([0, 1, -1]), key="dim")
)
# The cases of the comparison. The model and the call share ``dim``, the dimension that counts samples.
random_cases = given(
    model=random_models,
    dim=st.shared(st.sampled_from([0, 1, -1]), key="dim"),
    count=device_counts,
    samples=batch_sizes,
)


def images(samples: int, dim: int) -> Tensor:
    """Images ``[CHANNELS, SIDE, SIDE]``, with the samples along ``dim``."""
    return (
        rows(samples, CHANNELS * SIDE**2)
        .detach()
        .view(samples, CHANNELS, SIDE, SIDE)
        .movedim(0, dim)
        .contiguous()
        .requires_grad_()
    )


class Everywhere(nn.Module):
    """Applies one layer to each tensor of the arguments, and returns them in the same containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(1, 2)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return tree_map_only(Tensor, lambda one: self.layer(one.sum(-1, keepdim=True)), (args, kwargs))
