"""Forward and backward passes in other orders than one after the other."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint

from ddp.conformance.check import Wrap, check
from ddp.conformance.networks import one_pass
from ddp.conformance.tools import alone, average, expect, expect_same, gradients, inputs, layers, loss_of


@check
def two_forward_passes_may_share_a_backward_pass(wrap: Wrap) -> None:
    """As in contrastive learning: the loss depends on both outputs, and the gradients are averaged once, when all is summed."""

    def both(model: nn.Module) -> None:
        (loss_of(model(inputs(0))) + loss_of(model(inputs(1)))).backward()

    network = layers(3, 5, 2)
    expected = average(alone(network, both))
    model = wrap(network)
    for _ in range(2):
        model.zero_grad()
        both(model)
        expect_same(gradients(network), expected)


@check
def each_of_two_forward_passes_may_have_its_backward_pass(wrap: Wrap) -> None:
    """Forward, forward, backward, backward. torch 2.15 fails this: it averages in the first backward pass only, without a word,
    so the ranks' weights drift apart."""
    network = layers(3, 5, 2)
    own = zip(alone(network, one_pass(0)), alone(network, one_pass(1)), strict=True)
    expected = average([one + other for one, other in own])
    model = wrap(network)
    first, second = model(inputs(0)), model(inputs(1))
    loss_of(first).backward()
    loss_of(second).backward()
    expect_same(gradients(network), expected)


@check
def a_gradient_penalty_is_averaged_too(wrap: Wrap) -> None:
    """The loss has the gradient of the input in it (create_graph=True), so backward runs through a backward pass."""

    def penalized(model: nn.Module) -> None:
        x = inputs().requires_grad_()
        loss = loss_of(model(x))
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().sum()).backward()

    network = layers(3, 5, 2)
    expected = average(alone(network, penalized))
    model = wrap(network)
    for _ in range(2):
        model.zero_grad()
        penalized(model)
        expect_same(gradients(network), expected)


@check
def autograd_grad_leaves_the_gradients_alone(wrap: Wrap) -> None:
    """torch.autograd.grad returns this rank's own and sends nothing, so one rank may call it; training goes on after it."""
    network = layers(3, 5, 2)
    own, model = alone(network), wrap(network)
    if dist.get_rank() == 0:
        expect_same(torch.autograd.grad(loss_of(model(inputs())), list(network.parameters())), own)
        expect_same(gradients(network), [None] * len(own))
    expected = average(own)
    for _ in range(2):
        model.zero_grad()
        one_pass()(model)
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


def _trains_with_checkpoints(wrap: Wrap, use_reentrant: bool) -> None:
    network = _Checkpointed(use_reentrant)
    expected = average(alone(network))
    model = wrap(network)
    for _ in range(2):
        model.zero_grad()
        one_pass()(model)
        expect_same(gradients(network), expected)


@check
def layers_may_be_checkpointed(wrap: Wrap) -> None:
    """Layers run forward again within the backward pass; that is no new forward pass of the model."""
    _trains_with_checkpoints(wrap, use_reentrant=False)


@check
def layers_may_be_checkpointed_with_a_backward_pass_of_their_own(wrap: Wrap) -> None:
    """use_reentrant=True starts a backward pass within the backward pass: the end of the inner one is not the end."""
    _trains_with_checkpoints(wrap, use_reentrant=True)


@check
def the_whole_wrapper_may_be_checkpointed(wrap: Wrap) -> None:
    """The wrapper's own forward runs again within the backward pass, and the gradients are still averaged."""
    network = layers(3, 5, 2)
    expected = average(alone(network))
    model = wrap(network)
    for _ in range(2):
        model.zero_grad()
        loss_of(checkpoint(model, inputs(), use_reentrant=False)).backward()
        expect_same(gradients(network), expected)


@check
def an_output_may_be_thrown_away(wrap: Wrap) -> None:
    """A forward pass without a backward pass (a skipped batch) must not change the step after it."""
    network = layers(3, 5, 2)
    expected = average(alone(network))
    model = wrap(network)
    for _ in range(2):
        model.zero_grad()
        model(inputs(1))
        one_pass()(model)
        expect_same(gradients(network), expected)


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
    """What the wrapper does to the output, to see where backward begins, must not make it a view that forbids that."""
    network = layers(3, 5, 2)
    expected = average(alone(network, lambda n: loss_of(n(inputs()).mul_(2).relu_()).backward()))
    model = wrap(network, find_unused_parameters=True)
    loss_of(model(inputs()).mul_(2).relu_()).backward()
    expect_same(gradients(network), expected)


@check
def an_optimizer_may_step_within_backward(wrap: Wrap) -> None:
    """Optimizers of _apply_optimizer_in_backward run when a gradient is averaged, not when this rank's own is ready. torch 2.15 fails
    this without an accelerator: its hook makes a torch.Stream, also for a module on the CPU."""
    network = layers(3, 5, 2)
    steps = average(alone(network))
    expected = [p.detach() - 0.1 * step for p, step in zip(network.parameters(), steps, strict=True)]
    _apply_optimizer_in_backward(torch.optim.SGD, network.parameters(), {"lr": 0.1})
    model = wrap(network)
    one_pass()(model)
    expect_same([p.detach() for p in network.parameters()], expected, "weight")


@check
def functional_call_puts_in_other_weights(wrap: Wrap) -> None:
    """torch.func.functional_call(model, weights, inputs) computes with these weights, as for any module."""
    network = layers(3, 5, 2)
    model = wrap(network)
    other = {name: 2 * weight.detach() for name, weight in model.named_parameters()}
    with torch.no_grad():
        found = torch.func.functional_call(model, other, (inputs(),))
        bare = {name.removeprefix("module."): weight for name, weight in other.items()}
        expected = torch.func.functional_call(network, bare, (inputs(),))
    expect_same([found], [expected], "output")


@check
def hooks_of_the_wrapper_run(wrap: Wrap) -> None:
    """It is a module: its forward pre-hooks see and change the inputs, its forward hooks the output, once each."""
    network = layers(3, 5, 2)
    expected = 3 * network(2 * inputs())
    model = wrap(network)
    handles = [model.register_forward_pre_hook(lambda _, args: (2 * args[0],))]
    handles.append(model.register_forward_hook(lambda _, args, output: 3 * output))
    found = model(inputs())
    for handle in handles:
        handle.remove()
    expect_same([found], [expected], "output")


class _Named(NamedTuple):
    scores: Tensor
    name: str


class _NamesItsOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(3, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"named": _Named(self.layers(x), "digits"), "none": None}


@check
def outputs_keep_their_types(wrap: Wrap) -> None:
    """A NamedTuple in a dict comes back as such, with what is no tensor, also when outputs are searched for tensors."""
    network = _NamesItsOutput()
    model = wrap(network, find_unused_parameters=True)
    output = model(inputs())
    expect(set(output) == {"named", "none"} and output["none"] is None, f"the output is {output}")
    expect(isinstance(output["named"], _Named), f"the NamedTuple is a {type(output['named']).__name__}")
    expect(output["named"].name == "digits", f"the name is {output['named'].name!r}")
    loss_of(output["named"].scores).backward()
