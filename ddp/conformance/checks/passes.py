"""Forward and backward passes in other orders than one after the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp.conformance.check import Wrap, check
from ddp.conformance.expectations import expect_averages, expect_same
from ddp.conformance.networks import layers
from ddp.conformance.steps import alone, average, backward, gradients, inputs, loss_of


@check
def two_forward_passes_may_share_a_backward_pass(wrap: Wrap) -> None:
    """As in contrastive learning: the loss depends on both outputs, and the gradients are averaged once, when all is summed."""

    def both(model: nn.Module) -> None:
        (loss_of(model(inputs(0))) + loss_of(model(inputs(1)))).backward()

    expect_averages(wrap, layers(3, 5, 2), steps=[both, both])


@check
def a_gradient_penalty_is_averaged_too(wrap: Wrap) -> None:
    """The loss has the gradient of the input in it (create_graph=True), so backward runs through a backward pass."""

    def penalized(model: nn.Module) -> None:
        x = inputs().requires_grad_()
        loss = loss_of(model(x))
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().sum()).backward()

    expect_averages(wrap, layers(3, 5, 2), steps=[penalized, penalized])


@check
def autograd_grad_leaves_the_gradients_alone(wrap: Wrap) -> None:
    """torch.autograd.grad returns this rank's own and sends nothing, so one rank may call it; training goes on after it."""
    network = layers(3, 5, 2)
    own = alone(network)
    expected, model = average(own), wrap(network)
    if dist.get_rank() == 0:
        expect_same(torch.autograd.grad(loss_of(model(inputs())), list(network.parameters())), own)
        expect_same(gradients(network), [None] * len(own))
    for _ in range(2):
        model.zero_grad()
        backward(model)
        expect_same(gradients(network), expected)


@check
def the_gradient_of_an_input_is_this_ranks_own(wrap: Wrap) -> None:
    """Only parameters are averaged. A wrapper that scales the loss instead would change the gradients of the layers before it."""
    network = layers(3, 5, 2)
    x, other = inputs().requires_grad_(), inputs().requires_grad_()
    loss_of(network(other)).backward()
    model = wrap(network)
    model.zero_grad()
    loss_of(model(x)).backward()
    expect_same([x.grad], [other.grad], "gradient of input")


class _Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.stem, self.blocks = layers(3, 3), nn.ModuleList([layers(3, 4, 3, seed=seed) for seed in (1, 2)])
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@check
def layers_may_be_checkpointed(wrap: Wrap) -> None:
    """Layers run forward again within the backward pass; that is no new forward pass of the model."""
    expect_averages(wrap, _Checkpointed(use_reentrant=False))


@check
def layers_may_be_checkpointed_with_a_backward_pass_of_their_own(wrap: Wrap) -> None:
    """use_reentrant=True starts a backward pass within the backward pass: the end of the inner one is not the end."""
    expect_averages(wrap, _Checkpointed(use_reentrant=True))


@check
def the_whole_wrapper_may_be_checkpointed(wrap: Wrap) -> None:
    """The wrapper's own forward runs again within the backward pass, and the gradients are still averaged."""

    def step(model: nn.Module) -> None:
        loss_of(checkpoint(model, inputs(), use_reentrant=False)).backward()

    expect_averages(wrap, layers(3, 5, 2), steps=[step, step])


@check
def an_output_may_be_thrown_away(wrap: Wrap) -> None:
    """A forward pass without a backward pass (a skipped batch) must not change the step after it."""

    def step(model: nn.Module) -> None:
        model(inputs(1))
        backward(model)

    expect_averages(wrap, layers(3, 5, 2), steps=[step, step])


class _KeepsItsLoss(nn.Module):
    loss: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(3, 5, 2)

    def forward(self, x: Tensor) -> None:
        self.loss = loss_of(self.layers(x))


@check
def the_loss_may_be_kept_in_an_attribute(wrap: Wrap) -> None:
    """The output shows nothing of the graph, so a wrapper that hooks outputs alone never learns that backward begins."""
    network = _KeepsItsLoss()
    expected = average(alone(network.layers))
    model = wrap(network)
    for _ in range(2):
        model.zero_grad()
        model(inputs())
        network.loss.backward()
        expect_same(gradients(network), expected)


@check
def the_output_may_be_changed_in_place(wrap: Wrap) -> None:
    """The wrapper marks the output, to see where backward begins. That must not make it a view that forbids this."""

    def step(model: nn.Module) -> None:
        loss_of(model(inputs()).mul_(2).relu_()).backward()

    expect_averages(wrap, layers(3, 5, 2), steps=[step], find_unused_parameters=True)


@check
def hooks_of_the_wrapper_run(wrap: Wrap) -> None:
    """It is a module: its forward pre-hooks see and change the inputs, its forward hooks the output, once each."""
    network = layers(3, 5, 2)
    expected = 3 * network(2 * inputs())
    model = wrap(network)
    model.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    model.register_forward_hook(lambda _, args, output: 3 * output)
    expect_same([model(inputs())], [expected], "output")
