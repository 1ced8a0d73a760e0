"""static_graph=True: the first backward pass shows how all others will use the parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp.conformance.check import Wrap, check
from ddp.conformance.networks import Branches, one_pass
from ddp.conformance.tools import EACH_ALONE, alone, average, expect_same, gradients, layers


@check
def the_first_step_of_a_static_graph_is_averaged_too(wrap: Wrap) -> None:
    """The first pass is the one that is recorded; its gradients are averages nevertheless."""
    network = layers(3, 5, 2)
    expected = average(alone(network))
    model = wrap(network, static_graph=True)
    one_pass()(model)
    expect_same(gradients(network), expected)


@check
def a_static_graph_trains_as_a_dynamic_one(wrap: Wrap) -> None:
    """After the first step, buckets are built again in the recorded order: no gradient may come to another parameter."""
    static, dynamic = layers(3, 3, 3, 3, 2), layers(3, 3, 3, 3, 2)
    model = wrap(static, static_graph=True, bucket_cap_mb=EACH_ALONE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        expected = average(alone(dynamic, one_pass(step)))
        optimizer.zero_grad()
        one_pass(step)(model)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_sub_(list(dynamic.parameters()), expected, alpha=0.1)
    expect_same(list(static.parameters()), list(dynamic.parameters()), "weight")


@check
def a_static_graph_may_have_unused_parameters(wrap: Wrap) -> None:
    """The first pass shows that they are unused: no search is needed later, and they stay without gradient."""
    network = Branches()
    model = wrap(network, static_graph=True)
    for step in range(3):
        model.zero_grad()
        expected = average(alone(network, one_pass(step, 0, 2)))
        one_pass(step, 0, 2)(model)
        expect_same(gradients(network), [*expected[:2], None, None, *expected[4:]])


@check
def ranks_may_have_different_static_graphs(wrap: Wrap) -> None:
    """A rank that never uses a parameter contributes zeros to it and gets its average, in the first step and later."""
    network = Branches()
    used = (0,) if dist.get_rank() == 0 else (0, 1)
    model = wrap(network, static_graph=True)
    for step in range(3):
        model.zero_grad()
        expected = average(alone(network, one_pass(step, *used)))
        one_pass(step, *used)(model)
        expect_same(gradients(network), [*expected[:4], None, None])


class _Repeated(nn.Module):
    """One layer in two reentrant checkpoints: its gradient becomes ready twice in one backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = layers(3, 3)[0], layers(3, 3, seed=1)[0]

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return x


@check
def a_layer_of_two_checkpoints_is_averaged_with_both_uses(wrap: Wrap) -> None:
    """With reentrant checkpoints, the gradient becomes ready once for each; only a static graph knows which one is the last."""
    network = _Repeated()
    model = wrap(network, static_graph=True)
    for step in range(3):
        model.zero_grad()
        expected = average(alone(network, one_pass(step)))
        one_pass(step)(model)
        expect_same(gradients(network), expected)


@check
def a_graph_may_be_declared_static_after_wrapping(wrap: Wrap) -> None:
    """_set_static_graph() before the first step does what the option does."""
    network = Branches(2)
    model = wrap(network)
    model._set_static_graph()
    for step in range(3):
        model.zero_grad()
        expected = average(alone(network, one_pass(step, 1)))
        one_pass(step, 1)(model)
        expect_same(gradients(network), [None, None, *expected[2:]])


@check
def a_static_graph_accumulates_after_its_first_step(wrap: Wrap) -> None:
    """A pass under no_sync stays on its rank also when the graph is known; the next pass averages the sums."""
    network = layers(3, 5, 2)
    model = wrap(network, static_graph=True)
    one_pass(0)(model)
    for step in (1, 3):
        model.zero_grad()
        own = alone(network, one_pass(step))
        both = average([one + other for one, other in zip(own, alone(network, one_pass(step + 1)), strict=True)])
        with model.no_sync():
            one_pass(step)(model)
        expect_same(gradients(network), own, "gradient under no_sync")
        one_pass(step + 1)(model)
        expect_same(gradients(network), both)


@check
def a_static_graph_may_begin_under_no_sync(wrap: Wrap) -> None:
    """The first pass that synchronizes is the one to record, not the first of all. torch 2.15 fails this: an INTERNAL ASSERT."""
    network = layers(3, 5, 2)
    own = zip(alone(network, one_pass(0)), alone(network, one_pass(1)), strict=True)
    both = average([one + other for one, other in own])
    model = wrap(network, static_graph=True)
    with model.no_sync():
        one_pass(0)(model)
    one_pass(1)(model)
    expect_same(gradients(network), both)
