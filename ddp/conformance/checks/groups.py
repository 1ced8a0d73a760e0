"""Process groups: which ranks train together, several wrappers at once, and what a wrapper says about itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ddp.conformance.check import Wrap, check
from ddp.conformance.expectations import expect_averages, expect_same
from ddp.conformance.networks import Counter, layers
from ddp.conformance.steps import alone, average, backward, gradients, inputs, loss_of


@contextlib.contextmanager
def _rank_group(firsts: Sequence[int]) -> Iterator[Any]:
    """A block with this rank's process group, when the ranks are divided into groups.

    :param firsts: the first rank of each group, in order
    """
    ends = [*firsts[1:], dist.get_world_size()]
    groups = [dist.new_group(list(range(first, end))) for first, end in zip(firsts, ends, strict=True)]
    mine: Any = groups[sum(dist.get_rank() >= first for first in firsts) - 1]
    try:
        yield mine
    finally:
        dist.destroy_process_group(mine)


def _halves() -> AbstractContextManager[Any]:
    """This rank's group: the first half of the ranks, which is the larger one, or the others."""
    return _rank_group([0, (dist.get_world_size() + 1) // 2])


@check
def averages_are_over_the_given_group(wrap: Wrap) -> None:
    """process_group says who averages: rank 0 alone, and all others together."""
    with _rank_group([0, 1]) as group:
        network = layers(3, 5, 2)
        expected = average(alone(network), group)
        backward(wrap(network, process_group=group))
        expect_same(gradients(network), expected)


@check
def weights_are_those_of_the_group_s_first_rank(wrap: Wrap) -> None:
    """In a group that rank 0 is not in, its own first rank is the one that is copied."""
    with _rank_group([0, 1]) as group:
        network = layers(3, 5, 2, seed=dist.get_rank())
        model = wrap(network, process_group=group)
        expected = layers(3, 5, 2, seed=min(1, dist.get_rank()))
        expect_same(list(network.parameters()), list(expected.parameters()), "weight")
        del model


@check
def a_group_has_the_buffers_of_its_own_first_rank(wrap: Wrap) -> None:
    """The rank to copy from is rank 0 of the group, whichever it is in the world; before each forward pass, too."""
    network = Counter(start=10.0 * dist.get_rank(), step=1.0 + dist.get_rank())
    with _halves() as group:
        first, model = dist.get_global_rank(group, 0), wrap(network, process_group=group)
        network.expect(10.0 * first, "after wrapping")
        for _ in range(2):
            backward(model)
        network.expect(10.0 * first + 2.0 + first + dist.get_rank(), "after two passes")
        del model


@check
def a_device_mesh_is_a_group(wrap: Wrap) -> None:
    """device_mesh, of one dimension, names the ranks as process_group does."""
    network = layers(3, 5, 2)
    with _halves() as group:
        expected = average(alone(network), group)
        backward(wrap(network, device_mesh=DeviceMesh.from_group(group, "cpu")))
        expect_same(gradients(network), expected)


@check
def one_rank_is_a_group_too(wrap: Wrap) -> None:
    """The same script must run on one rank: its gradients are its own, divided by the size of its group, which is 1."""
    network = layers(3, 5, 2)
    own = alone(network)
    with _rank_group(range(dist.get_world_size())) as mine:
        backward(wrap(network, process_group=mine))
        expect_same(gradients(network), own)


@check
def two_groups_may_share_a_backward_pass(wrap: Wrap) -> None:
    """An encoder that all ranks train below a head that each half trains alone: each wrapper keeps to its own group."""
    encoder, head = layers(3, 4), layers(4, 2, seed=1)
    own = alone(nn.Sequential(encoder, head))
    with _halves() as group:
        expected = [*average(own[:2]), *average(own[2:], group)]
        model = nn.Sequential(wrap(encoder), wrap(head, process_group=group))
        for _ in range(2):
            model.zero_grad()
            backward(model)
            expect_same(gradients(model), expected)
        del model


@check
def two_wrappers_do_not_know_each_other(wrap: Wrap) -> None:
    """As a generator and a discriminator: while one accumulates under no_sync, the other one synchronizes."""
    first, second = layers(3, 5, 2), layers(3, 4, 2, seed=1)
    own, expected = alone(first), average(alone(second))
    one, two = wrap(first), wrap(second)
    for _ in range(2):
        one.zero_grad()
        two.zero_grad()
        with one.no_sync():
            loss_of(one(inputs())).backward()
            loss_of(two(inputs())).backward()
        expect_same(gradients(first), own, "gradient under no_sync")
        expect_same(gradients(second), expected)


@check
def an_empty_list_of_devices_is_accepted(wrap: Wrap) -> None:
    """Scripts pass device_ids=[] or None on the CPU, and output_device=None; inputs then stay where they are."""
    expect_averages(wrap, layers(3, 5, 2), device_ids=[], output_device=None)
