"""dataparallel/parallel.py: the outputs and the gradients are the plain module's."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dataparallel.parallel import HandwrittenDataParallel, scatter
from tests.dataparallel.modules import (
    CPU,
    Everywhere,
    Pair,
    Rows,
    assert_equal_to_plain,
    assert_same,
    batch_sizes,
    device_counts,
    filled,
    gradients,
    images,
    linear,
    loss_of,
    nested,
    outcome,
    random_cases,
    rows,
    wrapped,
)

# Random models and arguments


@settings(max_examples=60)
@random_cases
def test_random_models_equal_the_plain_ones(model: nn.Module, dim: int, count: int, samples: int) -> None:
    """Outputs and gradients of random models are those of the plain module.

    Claim (dataparallel/README.md): outputs and gradients are those of the plain module: random models, nested inputs.
    """
    assert_equal_to_plain(model, count, images(samples, dim), dim=dim)


@settings(max_examples=60)
@given(
    args=st.lists(nested, max_size=2),
    kwargs=st.dictionaries(st.sampled_from(["first", "second"]), nested, max_size=2),
    in_kwargs=st.booleans(),
    count=device_counts,
    samples=batch_sizes,
)
def test_nested_inputs_and_outputs_equal_the_plain_ones(
    args: list[Any], kwargs: dict[str, Any], in_kwargs: bool, count: int, samples: int
) -> None:
    """Nested inputs and outputs come out as from the plain module.

    Claim (dataparallel/README.md): outputs and gradients are those of the plain module: random models, nested inputs.
    """
    if in_kwargs:
        kwargs = {**kwargs, "last": [Rows(2)]}
    else:
        args = [*args, Pair(Rows(2), "constant")]
    args, kwargs = filled(args, samples), filled(kwargs, samples)
    assert_equal_to_plain(Everywhere(), count, *args, **kwargs)


class Largest(nn.Module):
    """Returns torch's own kind of named tuple."""

    def forward(self, x: Tensor) -> Any:
        return x.max(1)


def test_torch_s_own_named_tuples_keep_their_type() -> None:
    assert_equal_to_plain(Largest(), 2, rows(5))


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


# BatchNorm


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


# Special layers


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: Callable[..., nn.RNNBase]) -> None:
    """The sample dimension is the second in inputs, outputs and states; time is the first."""
    module = kind(3, 4, num_layers=2, bidirectional=True).double()
    x = torch.randn(6, 5, 3, dtype=torch.float64, requires_grad=True)
    assert_equal_to_plain(module, 3, x, dim=1)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_embeddings(sparse: bool, count: int) -> None:
    """Dense and sparse embeddings have the plain module's gradients."""
    module = nn.Embedding(7, 3, padding_idx=2, sparse=sparse).double()
    plain, tokens = copy.deepcopy(module), torch.tensor([[0, 2], [1, 1], [6, 0], [5, 6], [2, 2]])
    for forward in (plain, wrapped(module, count)):
        for _ in range(2):
            loss_of(forward(tokens)).backward()
    assert module.weight.grad is not None
    assert plain.weight.grad is not None
    assert module.weight.grad.is_sparse == sparse
    assert_same(module.weight.grad.to_dense(), plain.weight.grad.to_dense())


def test_one_wrapper_inside_another() -> None:
    """A wrapper inside another has the plain module's outputs and gradients."""

    def make(count: int) -> nn.Module:
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double()
        return nn.Sequential(linear(3, 3), wrapped(inner, count), nn.Linear(4, 2).double())

    plain, module = make(1), make(2)
    assert_same(outcome(wrapped(module, 3), rows(9))[:2], outcome(plain, rows(9))[:2])


# The wrapper as a module


def test_parameters_and_state_are_the_module_s_own() -> None:
    module = nn.Sequential(linear(), nn.BatchNorm1d(2).double())
    wrapper = wrapped(module, 2)
    assert list(wrapper.parameters()) == list(module.parameters())
    assert list(wrapper.state_dict()) == [f"module.{key}" for key in module.state_dict()]
    parts = list(module.modules())
    wrapper(rows(4)).sum().backward()
    assert list(module.modules()) == parts
    assert all(isinstance(parameter, nn.Parameter) and parameter.is_leaf for parameter in module.parameters())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda wrapper: pickle.loads(pickle.dumps(wrapper))])
def test_copies_and_pickles_work_and_share_nothing(
    duplicate: Callable[[HandwrittenDataParallel], HandwrittenDataParallel],
) -> None:
    wrapper = wrapped(linear(), 2)
    expected = wrapper(rows(4))
    other = duplicate(wrapper)
    assert other.devices == wrapper.devices
    assert_same(other(rows(4)), expected)
    loss_of(other(rows(4))).backward()
    assert gradients(wrapper) == [None, None]
    assert_equal_to_plain(wrapper.module, 2, rows(4))


def test_each_step_is_reported() -> None:
    reported: list[str] = []

    @contextlib.contextmanager
    def step(name: str) -> Iterator[None]:
        reported.append(name)
        yield
        reported.append(f"{name} ended")

    wrapper = wrapped(linear(), 2)
    wrapper.step = step
    output = wrapper(rows(4))
    forward = ["scatter", "replicate", "forward", "gather"]
    assert reported == [line for name in forward for line in (name, f"{name} ended")]
    reported.clear()
    output.sum().backward()
    assert reported == ["reduce", "reduce ended"]
    reported.clear()
    alone = wrapped(linear(), 1)
    alone.step = step
    alone(rows(4)).sum().backward()
    assert reported == ["scatter", "scatter ended"]
