"""Errors: what cannot work is refused where a person can see why, and an error does not spoil the steps after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ddp.conformance.check import Wrap, check
from ddp.conformance.expectations import error_of, expect, expect_refused, expect_same
from ddp.conformance.networks import layers
from ddp.conformance.steps import alone, average, backward, gradients, inputs, passes


class _Unused(nn.Module):
    """A network with a layer that no forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.forgotten = layers(3, 2), layers(3, 2)

    def forward(self, inputs: Tensor) -> Any:
        return self.used(inputs)


@check
def an_unused_parameter_is_an_error(wrap: Wrap) -> None:
    """Without find_unused_parameters, a layer without gradients is refused in backward or in the next forward pass."""
    model = wrap(_Unused())
    # torch finds an unused parameter when the next forward pass begins.
    expect_refused(lambda: passes(0, 1)(model), "a layer that is never used, without find_unused_parameters,")


@check
def the_error_of_an_unused_parameter_names_it(wrap: Wrap) -> None:
    """Its name, or its number among the parameters, is in the message: here 2 and 3."""
    model = wrap(_Unused())
    text = str(error_of(lambda: passes(0, 1)(model)))
    named = "forgotten" in text or ("2" in text and "3" in text)
    expect(named, f"the error names neither forgotten.0.weight nor its number: {text[:300]}")


@check
def a_module_with_nothing_to_train_is_refused(wrap: Wrap) -> None:
    """Without a parameter that needs a gradient, there is nothing to average: most likely, a line is missing."""
    network = layers(3, 2).requires_grad_(False)
    expect_refused(lambda: wrap(network), "a module whose parameters are all frozen")


@check
def device_ids_for_a_module_on_the_cpu_are_refused(wrap: Wrap) -> None:
    """device_ids=[0] with a module that was never moved there would send the inputs elsewhere than the weights."""
    expect_refused(lambda: wrap(layers(3, 2), device_ids=[0]), "device_ids=[0] for a module on the CPU")


@check
def lazy_parameters_are_refused(wrap: Wrap) -> None:
    """A LazyLinear has no weights yet: there is nothing to send, and what comes later would differ between ranks."""
    network = nn.Sequential(layers(3, 5), nn.LazyLinear(2))
    expect_refused(lambda: wrap(network), "a module with uninitialized parameters")


@check
def parameters_on_two_kinds_of_device_are_refused(wrap: Wrap) -> None:
    """A layer that was left on the meta device has no values to send."""
    network = nn.Sequential(layers(3, 5), nn.Linear(5, 2, device="meta"))
    expect_refused(lambda: wrap(network), "a module on the CPU and on the meta device")


class _Fails(Exception):
    """The error that a check raises within a wrapped module."""


class _FailsAtTimes(nn.Module):
    """Raises an error in forward while ``fails`` is True."""

    fails = True

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = layers(3, 5, 5), layers(5, 5, 2)

    def forward(self, inputs: Tensor) -> Any:
        middle = self.before(inputs)
        if self.fails:
            raise _Fails
        return self.after(middle)


@check
def a_module_s_error_comes_out_as_it_is(wrap: Wrap) -> None:
    """The loop may want to catch it: the wrapper neither hides it nor turns it into another."""
    model = wrap(_FailsAtTimes())
    kind = type(error_of(lambda: model(inputs()))).__name__
    expect(kind == "_Fails", f"the module raises _Fails, and the wrapper {kind}")


@check
def training_goes_on_after_an_error_in_forward(wrap: Wrap) -> None:
    """A batch that fails on all ranks is skipped, and the next one is averaged."""
    network = _FailsAtTimes()
    network.fails = False
    expected = average(alone(network))
    model = wrap(network)
    for _ in range(2):
        network.fails = True
        error_of(lambda: model(inputs(9)))
        network.fails = False
        model.zero_grad()
        backward(model)
        expect_same(gradients(network), expected)


@check
def options_that_do_not_exist_are_refused(wrap: Wrap) -> None:
    """A misspelled option, find_unused_parameter, is an error, and not silently without effect."""
    options = {"find_unused_parameter": True}
    error = error_of(lambda: wrap(layers(3, 2), **options))
    expect(isinstance(error, TypeError), f"a misspelled option leads to {error!r} instead of a TypeError")


@check
def a_group_and_a_mesh_together_are_refused(wrap: Wrap) -> None:
    """process_group and device_mesh both say who averages: with two answers, neither can be meant."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    options = {"process_group": torch.distributed.group.WORLD, "device_mesh": mesh}
    expect_refused(lambda: wrap(layers(3, 2), **options), "process_group together with device_mesh")
