"""dataparallel/parallel.py: gradients add up as in the plain module, unused parameters have none, optimizers step alike."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.dataparallel.modules import (
    Buffers,
    Tied,
    assert_equal_to_plain,
    assert_same,
    gradients,
    images,
    layer,
    linear,
    random_model,
    rows,
    wrapped,
)
from tests.support.zoo.named import loss_of
from tests.support.zoo.random_models import Part


def test_several_forwards_before_one_backward_and_a_graph_that_is_kept() -> None:
    plain, module = linear(), linear()
    wrapper = wrapped(module, 3)
    for forward in (plain, wrapper):
        loss = loss_of([forward(rows(samples, seed=samples)) for samples in (5, 2, 7)])
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(gradients(module), gradients(plain))


def test_gradients_of_gradients_equal_the_plain_ones() -> None:
    """A penalty on the gradients of inputs and parameters."""
    plain, module = Tied(), Tied()
    module.load_state_dict(plain.state_dict())
    penalized = []
    for forward, owner in ((plain, plain), (wrapped(module, 3), module)):
        x = rows(5, 4)
        first = torch.autograd.grad(loss_of(forward(x)), [x, *owner.parameters()], create_graph=True)
        torch.stack([one.square().sum() for one in first]).sum().backward()
        penalized.append([x.grad, *gradients(owner)])
    assert_same(*penalized)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_optimizer_steps_equal_the_plain_ones(optimizer: type[torch.optim.Optimizer]) -> None:
    """Optimizer steps end with the parameters of the plain module.

    Claim (dataparallel/README.md): outputs and gradients are those of the plain module: random models, nested inputs.
    """
    plain = random_model([layer(Part("conv")), Tied(), layer(Part("layernorm")), Buffers()], 0)
    module = copy.deepcopy(plain)
    for forward in (plain, wrapped(module, 3)):
        learner = optimizer([p for p in forward.parameters() if p.requires_grad], lr=0.01)  # type: ignore[call-arg]
        for _ in range(3):
            learner.zero_grad()
            loss_of(forward(images(5, 0))).backward()
            learner.step()
    assert_same(module.state_dict(), plain.state_dict())


def test_hooks_run_for_each_replica_and_gradient_hooks_once() -> None:
    """Hooks run for each replica and gradient hooks once.

    Claim (dataparallel/README.md): hooks run once per replica; the first replica has the module's own tensors.
    """
    module = linear()
    calls: list[tuple[str, int]] = []
    module.register_forward_hook(lambda _, args, output: calls.append(("forward", len(output))))
    module.register_full_backward_hook(lambda _, before, after: calls.append(("backward", len(next(iter(after))))))
    module.weight.register_hook(lambda gradient: calls.append(("weight", len(gradient))))
    wrapped(module, 3)(rows(5)).sum().backward()
    parts = [1, 2, 2]
    expected = [("backward", part) for part in parts] + [("forward", part) for part in parts]
    assert sorted(calls) == [*expected, ("weight", 2)]


def test_a_module_may_change_its_input_in_place() -> None:
    """Each replica changes its own part, also after another replica has saved its part for the backward pass."""
    module = nn.Sequential(nn.ReLU(inplace=True), linear())
    for _ in range(20):
        assert_equal_to_plain(copy.deepcopy(module), 3, rows(9, requires_grad=False))
