"""Process groups: which ranks train together, several wrappers at once, and what a wrapper says about itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ddp.conformance.check import Wrap, check
from ddp.conformance.networks import Counter
from ddp.conformance.tools import EACH_ALONE, alone, average, expect, expect_same, gradients, inputs, layers, loss_of


@contextmanager
def _halves() -> Iterator[Any]:
    """This rank's group: the first half of the ranks, which is the larger one, or the others."""
    size, rank = dist.get_world_size(), dist.get_rank()
    middle = (size + 1) // 2
    groups = [dist.new_group(list(range(middle))), dist.new_group(list(range(middle, size)))]
    mine = groups[rank >= middle]
    try:
        yield mine
    finally:
        dist.destroy_process_group(mine)


@check
def a_group_has_the_buffers_of_its_own_first_rank(wrap: Wrap) -> None:
    """The rank to copy from is rank 0 of the group, whichever it is in the world; before each forward pass, too."""
    middle = (dist.get_world_size() + 1) // 2
    first = middle if dist.get_rank() >= middle else 0
    network = Counter(start=10.0 * dist.get_rank(), step=1.0 + dist.get_rank())
    with _halves() as group:
        model = wrap(network, process_group=group)
        found, expected = network.count.item(), 10.0 * first
        expect(found == expected, f"the buffer is {found:g} instead of {expected:g} after wrapping")
        for _ in range(2):
            loss_of(model(inputs())).backward()
        found, expected = network.count.item(), 10.0 * first + 2.0 + first + dist.get_rank()
        expect(found == expected, f"the buffer is {found:g} instead of {expected:g} after two passes")
        del model


@check
def a_device_mesh_is_a_group(wrap: Wrap) -> None:
    """device_mesh, of one dimension, names the ranks as process_group does."""
    network = layers(3, 5, 2)
    with _halves() as group:
        expected = average(alone(network), group)
        model = wrap(network, device_mesh=DeviceMesh.from_group(group, "cpu"))
        loss_of(model(inputs())).backward()
        expect_same(gradients(network), expected)
        del model


@check
def one_rank_is_a_group_too(wrap: Wrap) -> None:
    """The same script must run on one rank: its gradients are its own, divided by the size of its group, which is 1."""
    network = layers(3, 5, 2)
    own = alone(network)
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    mine: Any = groups[dist.get_rank()]
    model = wrap(network, process_group=mine)
    loss_of(model(inputs())).backward()
    expect_same(gradients(network), own)
    del model
    dist.destroy_process_group(mine)


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
            loss_of(model(inputs())).backward()
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
def logged_numbers_are_true(wrap: Wrap) -> None:
    """_get_ddp_logging_data tells the ranks, the bytes of the parameters, and which buckets they are in."""
    network = layers(3, 5, 2)
    model = wrap(network, bucket_cap_mb=EACH_ALONE)
    for _ in range(4):  # the buckets are built anew after the first pass, and logged at the beginning of a later one
        loss_of(model(inputs())).backward()
    sizes = [4 * parameter.numel() for parameter in network.parameters()]
    expected: dict[str, Any] = {
        "world_size": dist.get_world_size(),
        "rank": dist.get_rank(),
        "num_parameter_tensors": len(sizes),
    }
    expected |= {"total_parameter_size_bytes": sum(sizes), "module_name": "Sequential", "backend_name": "gloo"}
    data = model._get_ddp_logging_data()
    found = {name: data.get(name) for name in expected}
    expect(found == expected, f"{found} instead of {expected}")
    buckets = sorted(int(size) for size in data["rebuilt_bucket_sizes"].split(","))
    expect(sum(buckets) == sum(sizes) and len(buckets) > 1, f"the buckets have {buckets} bytes")


@check
def an_empty_list_of_devices_is_accepted(wrap: Wrap) -> None:
    """Scripts pass device_ids=[] or None on the CPU, and output_device=None; inputs then stay where they are."""
    network = layers(3, 5, 2)
    expected = average(alone(network))
    model = wrap(network, device_ids=[], output_device=None)
    loss_of(model(inputs())).backward()
    expect_same(gradients(network), expected)
