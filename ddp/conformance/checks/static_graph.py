"""static_graph=True: the first backward pass shows how all others will use the parameters."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp.conformance.check import Wrap, check
from ddp.conformance.networks import Branches
from ddp.conformance.tools import (
    EACH_ALONE,
    alone,
    average,
    backward,
    expect_averages,
    expect_same,
    expect_training_of_one_process,
    gradients,
    layers,
    one_pass,
    passes,
)


@check
def the_first_step_of_a_static_graph_is_averaged_too(wrap: Wrap) -> None:
    """The first pass is the one that is recorded; its gradients are averages nevertheless."""
    expect_averages(wrap, layers(3, 5, 2), steps=[backward], static_graph=True)


@check
def a_static_graph_trains_as_a_dynamic_one(wrap: Wrap) -> None:
    """After the first step, buckets are built again in the recorded order: no gradient may come to another parameter."""
    steps = [[number] for number in range(4)]
    expect_training_of_one_process(wrap, steps, static_graph=True, bucket_cap_mb=EACH_ALONE)


@check
def a_static_graph_may_have_unused_parameters(wrap: Wrap) -> None:
    """The first pass shows that they are unused: no search is needed later, and they stay without gradient."""
    expect_averages(wrap, Branches(), steps=[one_pass(number, 0, 2) for number in range(3)], static_graph=True)


@check
def ranks_may_have_different_static_graphs(wrap: Wrap) -> None:
    """A rank that never uses a parameter contributes zeros to it and gets its average, in the first step and later."""
    used = (0,) if dist.get_rank() == 0 else (0, 1)
    expect_averages(wrap, Branches(), steps=[one_pass(number, *used) for number in range(3)], static_graph=True)


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
    expect_averages(wrap, _Repeated(), steps=list(map(one_pass, range(3))), static_graph=True)


@check
def a_graph_may_be_declared_static_after_wrapping(wrap: Wrap) -> None:
    """_set_static_graph() before the first step does what the option does."""

    def declared(module: nn.Module, **options: Any) -> Any:
        model = wrap(module, **options)
        model._set_static_graph()
        return model

    expect_averages(declared, Branches(2), steps=[one_pass(number, 1) for number in range(3)])


@check
def a_static_graph_accumulates_after_its_first_step(wrap: Wrap) -> None:
    """A pass under no_sync stays on its rank also when the graph is known; the next pass averages the sums."""
    network = layers(3, 5, 2)
    model = wrap(network, static_graph=True)
    backward(model)
    for step in (1, 3):
        model.zero_grad()
        own = alone(network, one_pass(step))
        both = average(alone(network, passes(step, step + 1)))
        with model.no_sync():
            backward(model, step)
        expect_same(gradients(network), own, "gradient under no_sync")
        backward(model, step + 1)
        expect_same(gradients(network), both)


@check
def a_static_graph_may_begin_under_no_sync(wrap: Wrap) -> None:
    """The first pass that synchronizes is the one to record, not the first of all. torch 2.15 fails this: an INTERNAL ASSERT."""
    network = layers(3, 5, 2)
    both = average(alone(network, passes(0, 1)))
    model = wrap(network, static_graph=True)
    with model.no_sync():
        backward(model, 0)
    backward(model, 1)
    expect_same(gradients(network), both)
