"""Buffers: rank 0's are sent to all, at construction and before forward passes."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.conformance.check import Wrap, check
from ddp.conformance.expectations import expect, expect_averages, expect_same
from ddp.conformance.networks import Counter, layers
from ddp.conformance.steps import backward, inputs, loss_of, of_all_ranks


@check
def buffers_are_rank_zeros_after_wrapping(wrap: Wrap) -> None:
    """Statistics and counters are sent with the weights: all ranks begin with the same state."""
    network = Counter(start=10.0 + dist.get_rank())
    model = wrap(network)
    network.expect(10.0, "after wrapping")
    del model


@check
def buffers_may_be_each_ranks_own_from_the_start(wrap: Wrap) -> None:
    """broadcast_buffers=False sends them neither at construction nor before a forward pass (torch 2.14; deprecated there)."""
    network = Counter(start=10.0 + dist.get_rank())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = wrap(network, broadcast_buffers=False)
    network.expect(10.0 + dist.get_rank(), "after wrapping")
    backward(model)
    model(inputs(1))
    network.expect(12.0 + dist.get_rank(), "after two forward passes")


def _expect_rank_zeros(wrap: Wrap, kind: type[Counter]) -> None:
    """Three forward passes, each of which increases rank 0's buffer by 1, and the others' by more."""
    network = kind(step=1.0 + dist.get_rank())
    model = wrap(network)
    for before in (0.0, 1.0, 2.0):
        backward(model)
        network.expect(before + 1.0 + dist.get_rank(), "after a forward pass")


@check
def rank_zeros_buffers_are_sent_before_each_forward_pass(wrap: Wrap) -> None:
    """A pass begins with rank 0's state on all ranks; what it changes is each rank's own until the next one."""
    _expect_rank_zeros(wrap, Counter)


@check
def buffers_may_go_their_own_ways(wrap: Wrap) -> None:
    """With forward_sync_buffers=False, no forward pass sends them."""
    network = Counter(step=1.0 + dist.get_rank())
    model = wrap(network, forward_sync_buffers=False)
    for step in (1, 2, 3):
        backward(model)
        network.expect(step * (1.0 + dist.get_rank()), "after a forward pass")


@check
def batchnorm_goes_on_from_the_statistics_of_rank_zero(wrap: Wrap) -> None:
    """Running statistics are those of rank 0, moved by each rank's own last batch; they are not averaged over the ranks."""
    network, alike = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    model = wrap(network)
    backward(model)
    loss_of(model(inputs(1))).backward()
    alike(of_all_ranks(inputs())[0])
    alike(inputs(1))
    expect_same(list(network.buffers()), list(alike.buffers()), "buffer")


@check
def buffers_of_integers_and_flags_are_sent(wrap: Wrap) -> None:
    """Counters and masks belong to the state as much as floats; they must not be rounded on the way either."""
    network: Any = layers(3, 2)
    rank, large = dist.get_rank(), 2**53 + 1
    network.register_buffer("steps", torch.tensor([large if rank == 0 else rank]))
    network.register_buffer("mask", torch.tensor([rank == 0, rank != 0]))
    model = wrap(network)
    for when in ("after wrapping", "before a forward pass"):
        values = (network.steps.item(), network.mask.tolist())
        expect(values == (large, [True, False]), f"the buffers are {values} {when}")
        network.steps += rank
        network.mask ^= rank != 0
        backward(model)


@check
def buffers_that_are_not_saved_are_sent_too(wrap: Wrap) -> None:
    """A buffer with persistent=False is not in the state_dict, but it is part of the computation."""
    network = Counter(start=10.0 + dist.get_rank())
    network.register_buffer("count", network.count, persistent=False)
    model = wrap(network)
    network.count += dist.get_rank()
    backward(model)
    network.expect(11.0, "after a forward pass")


class _Reassigning(Counter):
    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + self.step  # a new tensor
        output: Tensor = self.layer(x) + self.count
        return output


@check
def a_buffer_that_the_module_replaces_is_sent(wrap: Wrap) -> None:
    """Many modules write ``self.mean = ...``: the tensor of the construction is not the buffer any more (pytorch#63916)."""
    _expect_rank_zeros(wrap, _Reassigning)


class _Scaled(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = layers(3, 2)
        self.register_buffer("scale", torch.full((2,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) * self.scale  # autograd saves the buffer for the backward pass
        return output


@check
def a_buffer_may_be_sent_while_an_earlier_pass_needs_it(wrap: Wrap) -> None:
    """Two forward passes, then backward: autograd must not complain that sending has changed a saved buffer in place."""

    def both(model: nn.Module) -> None:
        (loss_of(model(inputs())) + loss_of(model(inputs(1)))).backward()

    expect_averages(wrap, _Scaled(), steps=[both])


@check
def evaluation_begins_with_the_buffers_of_rank_zero(wrap: Wrap) -> None:
    """The first pass without gradients after a training step sends them, so that all ranks evaluate the same model."""
    network = nn.BatchNorm1d(3)
    model = wrap(network)
    backward(model)
    model.eval()
    with torch.no_grad():
        outputs = of_all_ranks(model(torch.ones(1, 3)))
    expect_same([outputs[dist.get_rank()]], [outputs[0]], "output")


@check
def later_passes_of_an_evaluation_send_nothing(wrap: Wrap) -> None:
    """After one pass without gradients, ranks may evaluate different numbers of batches, one of them alone."""
    network = Counter()
    model = wrap(network)
    with torch.no_grad():
        model(inputs())
        for _ in range(dist.get_rank()):
            model(inputs())
    network.expect(1.0 + dist.get_rank(), "after as many passes")


@check
def buffers_are_not_sent_between_micro_steps(wrap: Wrap) -> None:
    """Within no_sync only the first pass sends them: the others are to cost no communication."""
    network = Counter(step=1.0 + dist.get_rank())
    model = wrap(network)
    with model.no_sync():
        for _ in range(3):
            backward(model)
    network.expect(3 * (1.0 + dist.get_rank()), "after three micro-steps")
