"""Process groups: which ranks train together, several wrappers at once, and what a wrapper says about itself."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ddp.conformance.check import Wrap, check
from ddp.conformance.networks import Counter
from ddp.conformance.tools import (
    EACH_ALONE,
    alone,
    average,
    backward,
    expect,
    expect_averages,
    expect_same,
    gradients,
    inputs,
    layers,
    loss_of,
    rank_group,
)


def _halves() -> AbstractContextManager[Any]:
    """This rank's group: the first half of the ranks, which is the larger one, or the others."""
    return rank_group([0, (dist.get_world_size() + 1) // 2])


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
    with rank_group(range(dist.get_world_size())) as mine:
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
def logged_numbers_are_true(wrap: Wrap) -> None:
    """_get_ddp_logging_data tells the ranks, the bytes of the parameters, and which buckets they are in."""
    network = layers(3, 5, 2)
    model = wrap(network, bucket_cap_mb=EACH_ALONE)
    for _ in range(4):  # the buckets are built anew after the first pass, and logged at the beginning of a later one
        backward(model)
    sizes = [4 * parameter.numel() for parameter in network.parameters()]
    expected: dict[str, Any] = {"world_size": dist.get_world_size(), "rank": dist.get_rank()}
    expected |= {"num_parameter_tensors": len(sizes), "total_parameter_size_bytes": sum(sizes)}
    expected |= {"module_name": "Sequential", "backend_name": "gloo"}
    data = model._get_ddp_logging_data()
    logged = {name: data.get(name) for name in expected}
    expect(logged == expected, f"{logged} instead of {expected}")
    buckets = sorted(int(size) for size in data["rebuilt_bucket_sizes"].split(","))
    expect(sum(buckets) == sum(sizes) and len(buckets) > 1, f"the buckets have {buckets} bytes")


@check
def an_empty_list_of_devices_is_accepted(wrap: Wrap) -> None:
    """Scripts pass device_ids=[] or None on the CPU, and output_device=None; inputs then stay where they are."""
    expect_averages(wrap, layers(3, 5, 2), device_ids=[], output_device=None)
