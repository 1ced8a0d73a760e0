"""Join: ranks may have different numbers of batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from ddp.conformance.check import Wrap, check
from ddp.conformance.expectations import expect, expect_same
from ddp.conformance.networks import Branches, Counter, layers
from ddp.conformance.steps import alone, average, backward, gradients, inputs, loss_of, of_all_ranks, one_pass, passes

LEARNING_RATE = 0.1


def _train(model: Any, batches: Iterable[int]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for number in batches:
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()


def _trained(network: nn.Module, batches: int, divide_by_all: bool = True) -> list[Tensor]:
    """The weights after one process has trained with the batches of all ranks, of which this one has so many."""
    network = copy.deepcopy(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
    everyone: list[list[Tensor]] = of_all_ranks([inputs(number) for number in range(batches)])
    for step in range(max(map(len, everyone))):
        losses = [loss_of(network(batches[step])) for batches in everyone if step < len(batches)]
        optimizer.zero_grad()
        (torch.stack(losses).sum() / len(everyone if divide_by_all else losses)).backward()
        optimizer.step()
    return list(network.parameters())


def _expect_trained(wrap: Wrap, batches: int, join: Callable[[Any], Any], divide_by_all: bool = True) -> None:
    network = layers(3, 4, 2)
    expected = _trained(network, batches, divide_by_all)
    model = wrap(network)
    with join(model):
        _train(model, range(batches))
    expect_same(list(network.parameters()), expected, "weight")


@check
def ranks_may_have_different_numbers_of_batches(wrap: Wrap) -> None:
    """A rank that has finished contributes zeros, and the sum is still divided by all ranks."""
    _expect_trained(wrap, 1 + dist.get_rank(), lambda model: model.join())


@check
def the_sum_may_be_divided_by_the_ranks_that_are_left(wrap: Wrap) -> None:
    """With divide_by_initial_world_size=False, the last batches count as much as all others."""
    _expect_trained(
        wrap, 1 + 2 * dist.get_rank(), lambda model: model.join(divide_by_initial_world_size=False), divide_by_all=False
    )


@check
def all_ranks_count_again_after_the_block(wrap: Wrap) -> None:
    """The divisor of the last step within the block is not that of the first step after it."""
    network = layers(3, 4, 2)
    model = wrap(network)
    with model.join(divide_by_initial_world_size=False):
        _train(model, range(1 + dist.get_rank()))
    model.zero_grad()
    expected = average(alone(network))
    backward(model)
    expect_same(gradients(network), expected)


@check
def all_ranks_leave_the_block_with_the_weights_of_the_last_one(wrap: Wrap) -> None:
    """A rank that has finished does not step its optimizer, so it takes the weights of the last rank at the end."""
    network = layers(3, 4, 2)
    model = wrap(network)
    with model.join():
        _train(model, range(dist.get_world_size() - dist.get_rank()))
    weights: list[list[Tensor]] = of_all_ranks([parameter.detach() for parameter in network.parameters()])
    expect_same([parameter.detach() for parameter in network.parameters()], weights[0], "weight")


@check
def a_rank_may_have_no_batch_at_all(wrap: Wrap) -> None:
    """It takes part from the first step on, also in what the wrapper sets up then."""
    _expect_trained(wrap, 3 if dist.get_rank() == 1 else 0, lambda model: model.join())


@check
def the_gradients_of_a_finished_rank_stay_its_own(wrap: Wrap) -> None:
    """The zeros that it sends for the others are not written into its .grad."""
    network = layers(3, 4, 2)
    model = wrap(network, gradient_as_bucket_view=False)
    with model.join():
        for number in range(1 + dist.get_rank()):
            model.zero_grad()
            backward(model, number)
            last = gradients(network)
    expect_same(gradients(network), last)


@check
def all_ranks_stop_when_the_first_has_finished(wrap: Wrap) -> None:
    """With throw_on_early_termination, every rank gets a RuntimeError, instead of a hang or a step with fewer ranks."""
    model = wrap(layers(3, 4, 2))
    steps, thrown = 0, False
    try:
        with model.join(throw_on_early_termination=True):
            for number in range(2 + dist.get_rank()):
                backward(model, number)
                steps += 1
    except NotImplementedError:
        raise
    except RuntimeError:
        thrown = True
    expect(thrown, "no RuntimeError was raised although rank 0 had fewer batches")
    expect(steps == 2, f"{steps} steps were made instead of 2")


@check
def a_model_may_be_joined_from_outside(wrap: Wrap) -> None:
    """Join([model]) is what model.join() does: it passes its options to the model's join_hook."""
    _expect_trained(
        wrap, 1 + dist.get_rank(), lambda model: Join([model], divide_by_initial_world_size=False), divide_by_all=False
    )


@check
def two_models_may_join_together(wrap: Wrap) -> None:
    """In Join([one, two]), a finished rank follows both. (With divide_by_initial_world_size=False, torch divides the
    second model's gradients by all ranks: only the first one counts who is left.)"""
    first, second, batches = layers(3, 4, 2), layers(3, 2, seed=1), 1 + dist.get_rank()
    expected = [*_trained(first, batches), *_trained(second, batches)]
    one, two = wrap(first), wrap(second)
    with Join([one, two]):
        for number in range(batches):  # the same order on all ranks: collectives are matched by it
            _train(one, [number])
            _train(two, [number])
    expect_same([*first.parameters(), *second.parameters()], expected, "weight")


@check
def a_block_may_be_switched_off(wrap: Wrap) -> None:
    """With enable=False the block does nothing: a rank that comes to its end does not wait for the others."""
    block = wrap(layers(3, 4, 2)).join(enable=False)
    if dist.get_rank() == 0:
        with block:
            pass
    reached = of_all_ranks(dist.get_rank())
    expect(reached == list(range(dist.get_world_size())), f"the block sent something: {reached}")


@check
def gradients_may_be_accumulated_within_the_block(wrap: Wrap) -> None:
    """A finished rank must know which passes of the others are under no_sync, and send nothing for them."""
    network, rank = layers(3, 4, 2), dist.get_rank()
    first = average(alone(network))  # the second step is that of all ranks but 0
    second = average(alone(network, passes(1, 2) if rank else lambda _: None))
    model = wrap(network)
    with model.join():
        backward(model)
        expect_same(gradients(network), first)
        if rank:
            model.zero_grad()
            with model.no_sync():
                backward(model, 1)
            backward(model, 2)
            expect_same(gradients(network), second)


@check
def buffers_come_from_a_rank_that_still_has_batches(wrap: Wrap) -> None:
    """When rank 0 has finished, its buffers are old; those of a rank that goes on are sent, and all end with them."""
    network = Counter()
    model = wrap(network)
    with model.join():
        _train(model, range(1 if dist.get_rank() == 0 else 3))
    expect(network.count.item() == 3, f"the buffer counts {network.count.item():.0f} steps instead of 3")


@check
def ranks_with_unused_parameters_may_join(wrap: Wrap) -> None:
    """With find_unused_parameters, the ranks agree on what is used in every step; a finished one must take part in that, too."""
    network, rank = Branches(2), dist.get_rank()
    first, last = one_pass(0, 0, 1), one_pass(1, 1)
    average_of_first = average(alone(network, first))
    average_of_last = average(alone(network, last if rank else lambda _: None))
    model = wrap(network, find_unused_parameters=True)
    with model.join():
        first(model)
        if rank:
            model.zero_grad()
            last(model)
    expected = average_of_last if rank else average_of_first
    expect_same(gradients(network)[2:], expected[2:], "gradient of the branch that both steps use")
