"""Copies: what is copied, saved, dropped or wrapped again."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ddp.conformance.check import Wrap, check
from ddp.conformance.expectations import expect, expect_same
from ddp.conformance.networks import layers
from ddp.conformance.steps import alone, average, backward, gradients, inputs, loss_of


def _expect_averages(model: nn.Module, expected: list[torch.Tensor]) -> None:
    for _ in range(2):
        model.zero_grad()
        backward(model)
        expect_same(gradients(model), expected)


@check
def a_deep_copy_and_its_original_train_on(wrap: Wrap) -> None:
    """Each averages its own gradients, and leaves those of the other alone."""
    network = layers(3, 5, 2)
    expected = average(alone(network))
    model = wrap(network)
    backward(model)
    copied = copy.deepcopy(model)
    model.zero_grad()
    _expect_averages(copied, expected)
    expect_same(gradients(network), [None] * len(expected))
    _expect_averages(model, expected)


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
