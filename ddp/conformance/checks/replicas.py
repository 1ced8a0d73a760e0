"""Replicas: all ranks begin with rank 0's weights, and modules that differ are refused before anything hangs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.conformance.check import Wrap, check
from ddp.conformance.expectations import error_of, expect, expect_refused, expect_same
from ddp.conformance.networks import layers
from ddp.conformance.steps import alone, average, backward, gradients, of_all_ranks


class _WithBuffers(nn.Module):
    """A layer with a buffer of floats, one of integers, and a frozen parameter, filled by ``seed``."""

    mean: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = layers(3, 2, seed=seed)
        self.register_buffer("mean", torch.full((3,), float(seed)))
        self.register_buffer("count", torch.tensor(seed))
        self.frozen = nn.Parameter(torch.full((2,), float(seed)), requires_grad=False)

    def forward(self, inputs: Tensor) -> Any:
        return self.layer(inputs + self.mean) + self.frozen


@check
def weights_become_those_of_rank_0(wrap: Wrap) -> None:
    """Ranks that were seeded differently begin with the same weights: averages keep them equal, but do not make them so."""
    network = layers(3, 5, 2, seed=dist.get_rank())
    model = wrap(network)
    expect_same(list(network.parameters()), list(layers(3, 5, 2, seed=0).parameters()), "weight")
    del model


@check
def frozen_parameters_become_those_of_rank_0(wrap: Wrap) -> None:
    """A parameter without gradient is never averaged, so it must be equal from the start."""
    network = _WithBuffers(seed=dist.get_rank() + 3)
    model = wrap(network)
    expect_same([network.frozen], [torch.full((2,), 3.0)], "frozen parameter")
    del model


@check
def without_init_sync_the_weights_stay(wrap: Wrap) -> None:
    """init_sync=False is for weights that are known to be equal, from a checkpoint: nothing is sent."""
    network, before = (layers(3, 5, 2, seed=dist.get_rank()) for _ in range(2))
    model = wrap(network, init_sync=False)
    expect_same(list(network.parameters()), list(before.parameters()), "weight")
    del model


@check
def weights_are_sent_into_the_module_s_own_tensors(wrap: Wrap) -> None:
    """An optimizer that was made before wrapping trains the same parameters: none is replaced."""
    network = layers(3, 5, 2, seed=dist.get_rank())
    parameters, storages = list(network.parameters()), [p.data_ptr() for p in network.parameters()]
    model = wrap(network)
    same = [one is other for one, other in zip(model.parameters(), parameters, strict=False)]
    expect(same == [True] * 4, f"parameters() of the wrapper are the module's own: {same}")
    expect([p.data_ptr() for p in parameters] == storages, "the parameters have moved to other memory")


@check
def the_module_is_at_module(wrap: Wrap) -> None:
    """``model.module`` is the very module that was wrapped: evaluation and checkpoints take it from there."""
    network = layers(3, 2)
    expect(getattr(wrap(network), "module", None) is network, "model.module is not the module that was wrapped")


@check
def names_in_the_state_dict_begin_with_module(wrap: Wrap) -> None:
    """A checkpoint of one wrapper can be read by the other: the names are the module's, after ``module.``"""
    network = layers(3, 5, 2)
    names, expected = list(wrap(network).state_dict()), [f"module.{name}" for name in network.state_dict()]
    expect(names == expected, f"the state dict has {names} instead of {expected}")


@check
def a_loaded_state_dict_is_what_is_trained(wrap: Wrap) -> None:
    """Weights that are loaded after wrapping are used, and not overwritten by those from the start."""
    network, other = layers(3, 5, 2), layers(3, 5, 2, seed=1)
    expected = average(alone(other))
    model = wrap(network)
    backward(model)
    model.load_state_dict({f"module.{name}": tensor for name, tensor in other.state_dict().items()})
    model.zero_grad()
    backward(model)
    expect_same(gradients(network), expected)
    expect_same(list(network.parameters()), list(other.parameters()), "weight")


@check
def train_and_eval_reach_the_module(wrap: Wrap) -> None:
    """``model.eval()`` is for the module inside: it switches dropout off there."""
    network = nn.Sequential(layers(3, 2), nn.Dropout())
    model = wrap(network)
    for mode in (False, True):
        model.train(mode)
        expect(network[1].training is mode, f"after train({mode}), dropout inside has training={not mode}")


@check
def differing_numbers_of_parameters_are_refused_by_all_ranks(wrap: Wrap) -> None:
    """A rank that has one layer more, after layers that are the same, is found before collectives stop matching."""
    network = layers(3, 3, 3, *[3] * (dist.get_rank() == 1))
    expect_refused(lambda: wrap(network), "one layer more on rank 1")


@check
def differing_frozen_parameters_are_refused_by_all_ranks(wrap: Wrap) -> None:
    """A layer that one rank alone has frozen gets no gradient there, and buckets would not match."""
    network = layers(3, 3, 3)
    network[0].requires_grad_(dist.get_rank() != 1)
    expect_refused(lambda: wrap(network), "a layer that is frozen on rank 1 alone")


@check
def the_error_of_differing_modules_names_the_rank(wrap: Wrap) -> None:
    """Among a thousand processes, a person must learn which one was built differently."""
    network = layers(3, 3, 3, *[3] * (dist.get_rank() == 1))
    text = str(error_of(lambda: wrap(network)))
    named = [f"{word} {rank}" for word in ("rank", "ranks") for rank in of_all_ranks(dist.get_rank())]
    expect(any(name in text.lower() for name in named), f"the error names no rank: {text[:300]}")
