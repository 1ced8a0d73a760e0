"""Accumulation: within no_sync, gradients add up on each rank alone, and the next synchronized pass averages the sum."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist

from ddp.conformance.check import Wrap, check
from ddp.conformance.expectations import expect, expect_same, expect_training_of_one_process
from ddp.conformance.networks import layers
from ddp.conformance.recorder import Recorder
from ddp.conformance.steps import alone, average, backward, gradients, inputs, loss_of, passes


@check
def within_no_sync_gradients_stay_local(wrap: Wrap) -> None:
    """After forward and backward under no_sync, .grad is what this rank computed alone."""
    network = layers(3, 5, 2)
    own = alone(network)
    model = wrap(network)
    with model.no_sync():
        backward(model)
    expect_same(gradients(network), own)


@check
def within_no_sync_nothing_is_sent(wrap: Wrap) -> None:
    """The point of no_sync is the communication that it saves, in forward and in backward."""
    model = wrap(layers(3, 5, 2))
    passes(0, 1)(model)
    with Recorder() as record, model.no_sync():
        passes(1, 2)(model)
    expect(not record.messages, f"within no_sync, {[message.operator for message in record.messages]} are sent")


@check
def local_gradients_are_averaged_by_the_next_synchronized_pass(wrap: Wrap) -> None:
    """Two micro-steps under no_sync and one outside: .grad is the average over the ranks of the sum of all three."""
    _expect_average_of_the_sum(wrap, (0, 1))


def _expect_average_of_the_sum(wrap: Wrap, local: Sequence[int]) -> None:
    """Passes with these batches under no_sync, and one more outside, must leave the average of the ranks' sums."""
    network = layers(3, 5, 2)
    expected = average(alone(network, passes(*local, 9)))
    model = wrap(network)
    with model.no_sync():
        passes(*local)(model)
    backward(model, 9)
    expect_same(gradients(network), expected)


@check
def accumulation_works_step_after_step(wrap: Wrap) -> None:
    """Three optimizer steps of two micro-steps each come to the weights of one process with the whole batch."""
    expect_training_of_one_process(wrap, [[0, 1], [2, 3], [4, 5]])


@check
def accumulation_works_with_gradients_as_views(wrap: Wrap) -> None:
    """With gradient_as_bucket_view and gradients zeroed in place, .grad is a bucket's memory while local sums grow in it."""
    network = layers(3, 5, 2)
    expected = average(alone(network, passes(0, 1, 2)))
    model = wrap(network, gradient_as_bucket_view=True)
    for step in range(3):
        model.zero_grad(set_to_none=False)
        with model.no_sync():
            passes(0, 1)(model)
        backward(model, 2)
        expect_same(gradients(network), expected, f"step {step}'s gradient")


@check
def no_sync_ends_with_an_exception(wrap: Wrap) -> None:
    """An error within no_sync, which the loop survives, must not switch averaging off for good."""
    network = layers(3, 5, 2)
    expected = average(alone(network))
    model = wrap(network)
    with contextlib.suppress(KeyError), model.no_sync():
        raise KeyError("from the data set")
    backward(model)
    expect_same(gradients(network), expected)


@check
def no_sync_within_no_sync_ends_with_the_outer_one(wrap: Wrap) -> None:
    """A function that uses no_sync may be called within no_sync: its end does not end the caller's."""
    network = layers(3, 5, 2)
    own = alone(network)
    model = wrap(network)
    with model.no_sync():
        with model.no_sync():
            pass
        backward(model)
    expect_same(gradients(network), own)


@check
def a_forward_pass_within_no_sync_is_local_wherever_its_backward_is(wrap: Wrap) -> None:
    """It is decided in forward: this is why no_sync must stand around forward and backward."""
    network = layers(3, 5, 2)
    own = alone(network)
    model = wrap(network)
    with model.no_sync():
        loss = loss_of(model(inputs()))
    loss.backward()
    expect_same(gradients(network), own)


@check
def a_forward_pass_outside_no_sync_is_synchronized_wherever_its_backward_is(wrap: Wrap) -> None:
    """The other half: no_sync around backward alone does nothing."""
    _expect_average_after_forward(wrap, lambda model: model.no_sync())


def _expect_average_after_forward(wrap: Wrap, within: Callable[[Any], AbstractContextManager[None]]) -> None:
    """A backward pass within a context that begins after forward must leave the average over the ranks."""
    network = layers(3, 5, 2)
    expected = average(alone(network))
    model = wrap(network)
    loss = loss_of(model(inputs()))
    with within(model):
        loss.backward()
    expect_same(gradients(network), expected)


@check
def the_flag_of_no_sync_counts_when_forward_runs(wrap: Wrap) -> None:
    """``require_backward_grad_sync``, set between forward and backward, counts from the next forward pass on.

    A loop that sets it there averages the first of its micro-steps, and not the last (build-nanogpt#30).
    """

    def set_flag(model: Any) -> AbstractContextManager[None]:
        model.require_backward_grad_sync = False
        return contextlib.nullcontext()

    _expect_average_after_forward(wrap, set_flag)


@check
def ranks_may_take_different_numbers_of_local_steps(wrap: Wrap) -> None:
    """Rank 1 accumulates one micro-step more under no_sync; the averages come from all of them."""
    _expect_average_of_the_sum(wrap, range(1 + (dist.get_rank() == 1)))
