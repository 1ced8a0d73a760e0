"""Copies: what is copied, saved, dropped or wrapped again."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.optim.swa_utils import AveragedModel

from ddp.conformance.check import Wrap, check
from ddp.conformance.tools import alone, average, backward, expect, expect_same, gradients, inputs, layers, loss_of


def _expect_averages(model: nn.Module, expected: list[torch.Tensor]) -> None:
    for _ in range(2):
        model.zero_grad()
        backward(model)
        expect_same(gradients(model), expected)


@check
def a_deep_copy_trains_on(wrap: Wrap) -> None:
    """The copy averages its own gradients, and leaves those of the original alone."""
    network = layers(3, 5, 2)
    expected = average(alone(network))
    model = wrap(network)
    backward(model)
    copied = copy.deepcopy(model)
    model.zero_grad()
    _expect_averages(copied, expected)
    expect_same(gradients(network), [None] * len(expected))


@check
def the_original_trains_on_after_a_deep_copy(wrap: Wrap) -> None:
    """Training the copy and the original in turns mixes nothing up."""
    network = layers(3, 5, 2)
    expected = average(alone(network))
    model = wrap(network)
    copied = copy.deepcopy(model)
    for one in (model, copied, model):
        _expect_averages(one, expected)


@check
def a_wrapper_can_be_pickled(wrap: Wrap) -> None:
    """On the default group, torch.save(model) and loading it give a wrapper that still averages."""
    network = layers(3, 5, 2)
    expected = average(alone(network))
    model = pickle.loads(pickle.dumps(wrap(network)))
    _expect_averages(model, expected)


@check
def a_moving_average_of_the_wrapper_needs_no_other_rank(wrap: Wrap) -> None:
    """AveragedModel(model) copies the wrapper; the copy is updated on every rank, and evaluated here on rank 0 alone."""
    network = layers(3, 5, 2)
    model = wrap(network)
    averaged = AveragedModel(model)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(1.0)
        averaged.update_parameters(model)  # the first update copies
        if dist.get_rank() == 0:
            expect_same([averaged(inputs())], [network(inputs())], "output")
    expect_same(list(averaged.module.parameters()), list(network.parameters()), "weight")


@check
def distributed_checkpoints_have_the_modules_own_names(wrap: Wrap) -> None:
    """get_model_state_dict leaves out "module.", so that a checkpoint fits a model that is not wrapped. (torch knows its own
    class: a wrapper that does not derive from it fails this.)"""
    network = layers(3, 5, 2)
    names = list(get_model_state_dict(wrap(network)))
    expect(names == list(network.state_dict()), f"the keys are {names} instead of {list(network.state_dict())}")


@check
def optimizer_checkpoints_have_the_modules_own_names(wrap: Wrap) -> None:
    """get_optimizer_state_dict finds each parameter's state by the name that it has in the module."""
    network = layers(3, 2)
    model = wrap(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    backward(model)
    optimizer.step()
    state: Any = get_optimizer_state_dict(model, optimizer)
    names = [name for name, _ in network.named_parameters()]
    expect(list(state["state"]) == names, f"the keys are {list(state['state'])} instead of {names}")


@check
def a_dropped_wrapper_is_freed(wrap: Wrap) -> None:
    """Hooks on parameters must not keep the wrapper, and with it the buckets, alive as long as the module."""
    network = layers(3, 5, 2)
    model = wrap(network)
    backward(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    expect(reference() is None, "the wrapper is still alive after it was dropped")


@check
def a_dropped_wrapper_averages_no_more(wrap: Wrap) -> None:
    """Its hooks are gone from the parameters: the module trains alone, here on rank 0 only."""
    network = layers(3, 5, 2)
    model = wrap(network)
    backward(model)
    del model
    gc.collect()
    network.zero_grad()
    own = alone(network)
    if dist.get_rank() == 0:
        loss_of(network(inputs())).backward()
        expect_same(gradients(network), own)


@check
def a_wrapper_may_stand_in_another(wrap: Wrap) -> None:
    """Gradients of the inner module are averaged by both, which changes nothing: averages of averages."""
    inner, head = layers(3, 4), layers(4, 2, seed=1)
    expected = average(alone(nn.Sequential(inner, head)))
    model = wrap(nn.Sequential(wrap(inner), head))
    _expect_averages(model, expected)
