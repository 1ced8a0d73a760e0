"""The parameters that a pass uses: find_unused_parameters finds out in each, static_graph=True in the first."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp.conformance.check import Wrap, check
from ddp.conformance.expectations import expect_averages, expect_same, expect_training_of_one_process
from ddp.conformance.networks import Branches, layers
from ddp.conformance.steps import (
    EACH_ALONE,
    Step,
    alone,
    average,
    backward,
    gradients,
    inputs,
    loss_of,
    one_pass,
    passes,
)


@check
def a_parameter_that_one_rank_leaves_out_counts_as_zeros_there(wrap: Wrap) -> None:
    """The sum is divided by all ranks, not by those that used the parameter: the average must be that of the global batch."""
    used = (0,) if dist.get_rank() == 0 else (0, 1)
    expect_averages(wrap, Branches(2), steps=[one_pass(0, *used)], find_unused_parameters=True)


@check
def a_parameter_that_no_rank_uses_stays_without_gradient(wrap: Wrap) -> None:
    """Its .grad is None and not zeros: an optimizer with weight decay or momentum would change it otherwise."""
    network = Branches()
    model = wrap(network, find_unused_parameters=True)
    for _ in range(3):
        one_pass(0, 0, 1)(model)
        expect_same(gradients(network.branches[2]), [None, None], "gradient of the unused branch")
        model.zero_grad()


@check
def each_rank_may_use_other_parameters(wrap: Wrap) -> None:
    """A parameter that is used anywhere gets its average everywhere, also where rank 0 does not use it."""
    step = one_pass(0, 1 + dist.get_rank() % 2)
    expect_averages(wrap, Branches(), steps=[step, step], find_unused_parameters=True)


@check
def the_used_parameters_may_change_from_step_to_step(wrap: Wrap) -> None:
    """Which parameters are used is found out again in every forward pass."""
    used = [(0,), (1, 2), (0, 2), (1,)]
    steps = [one_pass(number, *branches) for number, branches in enumerate(used)]
    expect_averages(wrap, Branches(), steps=steps, find_unused_parameters=True)


@check
def an_old_gradient_stays_as_it_is_where_no_rank_uses_the_parameter(wrap: Wrap) -> None:
    """A backward pass adds nothing to it, so it must not touch it either."""
    network = Branches(2)
    model = wrap(network, find_unused_parameters=True)
    one_pass(0, 0, 1)(model)
    before = gradients(network)
    one_pass(1, 0)(model)
    expect_same(gradients(network)[2:], before[2:])


@check
def a_parameter_that_was_used_only_under_no_sync_is_averaged_too(wrap: Wrap) -> None:
    """Its gradient on each rank is its own until the pass that synchronizes, which must send it although it does not use it."""
    network = Branches(2)
    expected = average([*alone(network, one_pass(1, 0))[:2], *alone(network, one_pass(0, 1))[2:]])
    model = wrap(network, find_unused_parameters=True)
    with model.no_sync():
        one_pass(0, 1)(model)
    one_pass(1, 0)(model)
    expect_same(gradients(network), expected)


class _TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


@check
def an_output_may_be_left_out_of_the_loss(wrap: Wrap) -> None:
    """Its parameters are in the graph of the output, but backward never comes to them. The others must not wait for them."""
    steps: list[Step] = [lambda model, one=one: loss_of(model(inputs())[one]).backward() for one in (0, 1, 0)]  # type: ignore[misc]
    expect_averages(wrap, _TwoOutputs(), steps=steps, find_unused_parameters=True)


@check
def unused_parameters_that_are_the_same_everywhere_need_not_be_sent(wrap: Wrap) -> None:
    """With skip_all_reduce_unused_params, averages are right and an unused parameter keeps no gradient, step after step."""
    steps = [one_pass(number, 0, 2) for number in range(3)]
    expect_averages(wrap, Branches(), steps=steps, find_unused_parameters=True, skip_all_reduce_unused_params=True)


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
