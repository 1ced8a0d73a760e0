"""Forward: what a module takes and returns, and in which mode, changes nothing in the averages."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from ddp.conformance.check import Wrap, check
from ddp.conformance.expectations import expect, expect_averages, expect_same
from ddp.conformance.networks import layers
from ddp.conformance.steps import alone, average, backward, gradients, inputs, loss_of


@dataclasses.dataclass
class _Outputs:
    """An output that a network may return."""

    first: Tensor
    second: Tensor


class _Returns(nn.Module):
    """A network whose output is put into something by ``form``."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.network, self.form = layers(3, 5, 2), form

    def forward(self, inputs: Tensor) -> Any:
        output = self.network(inputs)
        return self.form(output[:, 0], output[:, 1])


@check
def outputs_may_be_nested_dicts_and_lists(wrap: Wrap) -> None:
    """The tensors that a loss is made of may stand anywhere in what forward returns."""

    def step(model: nn.Module) -> None:
        outputs = model(inputs())
        (outputs["all"][0] * outputs["all"][1]["other"][0]).sum().backward()

    network = _Returns(lambda first, second: {"all": [first, {"other": (second,)}], "name": "text"})
    expect_averages(wrap, network, steps=[step], find_unused_parameters=True)


@check
def outputs_may_be_dataclasses(wrap: Wrap) -> None:
    """A dataclass is as good as a tuple, and comes back as what it was."""

    def step(model: nn.Module) -> None:
        outputs = model(inputs())
        expect(isinstance(outputs, _Outputs), f"forward returns {type(outputs).__name__} instead of the dataclass")
        (outputs.first * outputs.second).sum().backward()

    expect_averages(wrap, _Returns(_Outputs), steps=[step], find_unused_parameters=True)


@check
def a_loss_may_use_one_output_of_several(wrap: Wrap) -> None:
    """An output that is only logged takes no part in backward, and nothing waits for it."""

    def step(model: nn.Module) -> None:
        model(inputs()).first.square().sum().backward()

    expect_averages(wrap, _Returns(_Outputs), steps=[step, step])


class _Named(nn.Module):
    """Takes an input by position and two by name."""

    def __init__(self) -> None:
        super().__init__()
        self.network = layers(3, 5, 2)

    def forward(self, inputs: Tensor, *, factor: float = 1.0, offset: Tensor | None = None) -> Any:
        return factor * self.network(inputs if offset is None else inputs + offset)


@check
def inputs_may_be_given_by_name(wrap: Wrap) -> None:
    """forward passes on positional and named arguments, tensors or not."""

    def step(model: nn.Module) -> None:
        loss_of(model(inputs(), factor=3.0, offset=inputs(1))).backward()

    expect_averages(wrap, _Named(), steps=[step])


@check
def an_evaluation_may_stand_between_forward_and_backward(wrap: Wrap) -> None:
    """A forward pass under no_grad does not undo what the pass before it has prepared."""

    def step(model: nn.Module) -> None:
        loss = loss_of(model(inputs()))
        with torch.no_grad():
            model(inputs(1))
        loss.backward()

    expect_averages(wrap, layers(3, 5, 2), steps=[step, step])


@check
def a_module_in_evaluation_mode_is_averaged_too(wrap: Wrap) -> None:
    """model.eval() changes dropout and BatchNorm, not whether gradients are averaged: fine-tuning does that."""
    network = layers(3, 5, 2)
    expected = average(alone(network))
    model = wrap(network)
    model.eval()
    backward(model)
    expect_same(gradients(network), expected)


@check
def inference_mode_gives_the_module_s_own_output(wrap: Wrap) -> None:
    """A pass without gradients is the module's, and training goes on after it."""
    network = layers(3, 5, 2)
    expected = average(alone(network))
    model = wrap(network)
    with torch.inference_mode():
        expect_same([model(inputs()).clone()], [network(inputs()).clone()], "output")
    backward(model)
    expect_same(gradients(network), expected)
