"""dataparallel/parallel.py: the outputs and the gradients are the plain module's."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from dataparallel.parallel import scatter
from tests.dataparallel.modules import (
    CPU,
    Everywhere,
    assert_equal_to_plain,
    assert_same,
    images,
    linear,
    random_cases,
    rows,
    wrapped,
)


@settings(max_examples=60)
@random_cases
def test_random_models_equal_the_plain_ones(model: nn.Module, dim: int, count: int, samples: int) -> None:
    """Outputs and gradients of random models are those of the plain module.

    Claim (dataparallel/README.md): outputs and gradients are those of the plain module: random models, nested inputs.
    """
    assert_equal_to_plain(model, count, images(samples, dim), dim=dim)


class Pair(NamedTuple):
    left: Any
    right: Any


@pytest.mark.parametrize(("samples", "count"), [(5, 3), (2, 4), (3, 1)])
def test_nested_inputs_and_outputs_equal_the_plain_ones(samples: int, count: int) -> None:
    """Nested inputs and outputs come out as from the plain module, in containers of the same types.

    Claim (dataparallel/README.md): outputs and gradients are those of the plain module: random models, nested inputs.
    """
    x, y, z = (rows(samples, width) for width in (1, 2, 3))
    args: tuple[Any, ...] = [x, None, (), {}, CPU], Pair(y, ("constant", OrderedDict({2: 1.5, 1: [z]})))
    assert_equal_to_plain(Everywhere(), count, *args, first=torch.return_types.max((x, y)), second={"float": float})


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.layer(x)
        return {"loss": y.square().mean(), "both": (y.sum(), y)}


@pytest.mark.parametrize(("samples", "count"), [(4, 2), (5, 3), (2, 4), (1, 3), (3, 1)])
def test_scalars_become_a_vector_with_one_element_per_replica(samples: int, count: int) -> None:
    """Scalars become a vector with one element per replica.

    Claim (dataparallel/README.md): scalars become a vector.
    """
    module, x = Scalars(), rows(samples)
    outputs = wrapped(module, count)(x)
    parts = [module(part) for part in x.chunk(count)]
    if count == 1:
        assert_same(outputs, parts[0])
        return
    assert_same(outputs["loss"], torch.stack([part["loss"] for part in parts]))
    assert_same(outputs["both"][0], torch.stack([part["both"][0] for part in parts]))
    assert_same(outputs["both"][1], torch.cat([part["both"][1] for part in parts]))
    expected = torch.autograd.grad(sum(part["loss"] for part in parts), [*module.parameters()])
    actual = torch.autograd.grad(outputs["loss"].sum(), [*module.parameters()])
    assert_same(actual, expected)


def test_scatter_cuts_as_torch_chunk_does() -> None:
    for size in range(1, 13):
        for count in range(1, 6):
            batch = torch.arange(size)
            parts = scatter(((batch,), {"k": batch}), [CPU] * count)
            expected = batch.chunk(count)
            assert len(parts) == len(expected)
            for (args, kwargs), piece in zip(parts, expected, strict=True):
                assert torch.equal(args[0], piece)
                assert torch.equal(kwargs["k"], piece)


def test_an_empty_batch_makes_an_empty_output() -> None:
    assert_equal_to_plain(linear(), 3, rows(0))


@pytest.mark.parametrize("samples", [9, 10, 4])
def test_batchnorm_normalizes_each_part_and_keeps_the_first_replica_s_statistics(samples: int) -> None:
    """BatchNorm normalizes each device's part and keeps the first replica's statistics.

    Claim (dataparallel/README.md): BatchNorm keeps the first replica's statistics.
    """
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    first, others = copy.deepcopy(module), copy.deepcopy(module)
    wrapper = wrapped(module, 2)
    for seed in range(3):
        x = rows(samples, seed=seed)
        parts = x.chunk(2)
        expected = torch.cat([first(parts[0]), *map(others, parts[1:])])
        assert_same(wrapper(x), expected)
    assert_same(dict(module.named_buffers()), dict(first.named_buffers()))
    assert module.get_buffer("1.num_batches_tracked") == 3

    module.zero_grad()
    assert_equal_to_plain(module.eval(), 3, rows(samples))


def test_recurrent_layers() -> None:
    """The sample dimension is the second in inputs, outputs and states; time is the first."""
    module = nn.LSTM(3, 4, num_layers=2, bidirectional=True).double()
    x = torch.randn(6, 5, 3, dtype=torch.float64, requires_grad=True)
    assert_equal_to_plain(module, 3, x, dim=1)


def test_parameters_and_state_are_the_module_s_own() -> None:
    module = nn.Sequential(linear(), nn.BatchNorm1d(2).double())
    wrapper = wrapped(module, 2)
    assert list(wrapper.parameters()) == list(module.parameters())
    assert list(wrapper.state_dict()) == [f"module.{key}" for key in module.state_dict()]
    parts = list(module.modules())
    wrapper(rows(4)).sum().backward()
    assert list(module.modules()) == parts
    assert all(isinstance(parameter, nn.Parameter) and parameter.is_leaf for parameter in module.parameters())
