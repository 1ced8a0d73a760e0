"""Overlap: gradients are sent once, in buckets, in the same order on all ranks, and while backward still goes on."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.conformance.check import Wrap, check
from ddp.conformance.expectations import expect, expect_averages, expect_same
from ddp.conformance.networks import layers
from ddp.conformance.recorder import Recorder
from ddp.conformance.steps import EACH_ALONE, alone, average, backward, gradients, inputs, loss_of

MIB = 2**20


def _recorded(model: nn.Module, batch: Tensor | None = None) -> Recorder:
    """The record of the third backward pass; the buckets are rebuilt after the first."""
    batch = inputs() if batch is None else batch
    for _ in range(3):
        model.zero_grad()
        loss, record = loss_of(model(batch)), Recorder()
        with record:
            loss.backward()
    return record


def _bytes(network: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in network.parameters() if parameter.requires_grad)


def _expect_sent_once(wrap: Wrap, network: nn.Module, batch: Tensor | None = None) -> None:
    """A step must send as many bytes as its gradients have, or half more for a reduce-scatter and an all-gather."""
    model, needed = wrap(network), _bytes(network)
    sent = sum(message.bytes for message in _recorded(model, batch).gradients)
    expect(needed <= sent <= 1.55 * needed, f"a step sends {sent} bytes for gradients of {needed} bytes")


@check
def every_gradient_is_sent_once(wrap: Wrap) -> None:
    """A step contributes as many bytes as the gradients have (half more for a reduce-scatter and an all-gather)."""
    _expect_sent_once(wrap, layers(3, 64, 64, 2))


@check
def frozen_parameters_are_not_sent(wrap: Wrap) -> None:
    """Buckets hold trained parameters only: a frozen backbone must cost neither memory nor time."""
    network = layers(3, 64, 64, 2)
    network[2].requires_grad_(False)
    _expect_sent_once(wrap, network)


@check
def gradients_travel_in_their_own_dtype(wrap: Wrap) -> None:
    """bfloat16 gradients take two bytes per element on the wire, too."""
    _expect_sent_once(wrap, layers(3, 64, 64, 2).bfloat16(), inputs().bfloat16())


@check
def small_gradients_travel_together(wrap: Wrap) -> None:
    """Eight small gradients take one message: each message costs a latency, which is why there are buckets."""
    number = len(_recorded(wrap(layers(3, 5, 5, 5, 2))).gradients)
    expect(1 <= number <= 2, f"8 small gradients are sent in {number} messages")


@check
def a_small_bucket_cap_gives_every_gradient_its_own_message(wrap: Wrap) -> None:
    """bucket_cap_mb below the smallest gradient means one message for each, so that the first can leave early."""
    number = len(_recorded(wrap(layers(3, 64, 64, 2), bucket_cap_mb=EACH_ALONE)).gradients)
    expect(6 <= number <= 12, f"6 gradients are sent in {number} messages")


@check
def buckets_keep_to_their_cap(wrap: Wrap) -> None:
    """bucket_cap_mb is in MiB: a bucket is closed when it has reached that, so it is larger by one gradient at most."""
    network = layers(64, *[64] * 8)
    record = _recorded(wrap(network, bucket_cap_mb=0.05), inputs(width=64))
    largest, allowed = max(message.bytes for message in record.gradients), 0.05 * MIB + 64 * 64 * 4
    expect(
        largest <= allowed, f"a message has {largest} bytes, with buckets of {0.05 * MIB:.0f} and gradients of 16384"
    )
    least = -(-_bytes(network) // int(allowed))
    expect(len(record.gradients) <= 2 * least + 2, f"{len(record.gradients)} messages where {least} have enough room")


@check
def a_list_gives_each_bucket_its_cap(wrap: Wrap) -> None:
    """bucket_cap_mb_list=[small, large] makes the first bucket small, so that sending begins early, and the next large."""
    model = wrap(layers(64, *[64] * 6), bucket_cap_mb_list=[EACH_ALONE, 1])
    sizes = sorted(message.bytes for message in _recorded(model, inputs(width=64)).gradients)
    expect(len(sizes) == 2, f"there are {len(sizes)} messages instead of 2: {sizes}")
    expect(sizes[0] <= 64 * 64 * 4, f"the messages have {sizes} bytes: the first bucket's cap is below one gradient")


@check
def sending_begins_while_backward_goes_on(wrap: Wrap) -> None:
    """The last layer's gradient leaves before the first layer's is computed: communication hides behind computation."""
    model = wrap(layers(3, 64, 64, 64, 2), bucket_cap_mb=EACH_ALONE)
    record = _recorded(model)
    products = [at for at, name in enumerate(record.operators) if name == "aten.mm"]
    after = sum(at > record.gradients[0].at for at in products)
    expect(after > 0, f"all {len(products)} matrix products of backward come before the first message")


@check
def the_last_layers_are_sent_first(wrap: Wrap) -> None:
    """Backward begins at the end of the network, so the first message is of the last layer."""
    network = layers(3, 1024, 32, 16)
    model = wrap(network, bucket_cap_mb=EACH_ALONE)
    first = _recorded(model).gradients[0].bytes
    expect(first <= 16 * 32 * 4, f"the first message has {first} bytes, the last layer's gradients 2048 and 64")


class _Backwards(nn.Module):
    """Layers that are used in the reverse order of their registration, each of another size."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(n, m, bias=False) for n, m in reversed(pairs)])

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            inputs = layer(inputs).tanh()
        return inputs


@check
def buckets_follow_the_order_in_which_gradients_come(wrap: Wrap) -> None:
    """A network that registered its layers in reverse is sent early too, from the second step on: buckets are rebuilt."""
    model = wrap(_Backwards(3, 64, 32, 16), bucket_cap_mb=EACH_ALONE)
    first = _recorded(model).gradients[0].bytes
    expect(first == 16 * 32 * 4, f"the first message of step 3 has {first} bytes, the first gradient to be ready 2048")


class _TwoWays(nn.Module):
    """Two square layers, which forward uses in this order or in the other."""

    def __init__(self, reverse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.reverse = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), reverse

    def forward(self, inputs: Tensor) -> Any:
        one, other = reversed(self.layers) if self.reverse else self.layers
        return other(one(inputs).tanh())


@check
def ranks_may_compute_in_different_orders(wrap: Wrap) -> None:
    """Collectives are matched by their order: a gradient that is ready early on one rank waits for its turn."""

    def step(model: nn.Module) -> None:
        loss_of(model(inputs(width=4))).backward()

    expect_averages(wrap, _TwoWays(reverse=dist.get_rank() == 1), steps=[step] * 3, bucket_cap_mb=EACH_ALONE)


@check
def a_forward_pass_without_buffers_sends_nothing(wrap: Wrap) -> None:
    """Weights are sent once, when the module is wrapped; equal gradients keep them equal."""
    model = wrap(layers(3, 64, 2))
    backward(model)
    backward(model)  # afterwards, all that is done once is done
    with Recorder() as record:
        output = model(inputs())
    expect(not record.messages, f"a forward pass sends {[message.operator for message in record.messages]}")
    loss_of(output).backward()


@check
def ranks_may_evaluate_different_numbers_of_batches(wrap: Wrap) -> None:
    """A forward pass under no_grad sends nothing, so rank 1 may have more of them."""
    network = layers(3, 5, 2)
    expected = average(alone(network))
    model = wrap(network)
    with torch.no_grad(), Recorder() as record:
        for _ in range(2 + 3 * (dist.get_rank() == 1)):
            model(inputs())
    expect(not record.messages, f"an evaluation sends {[message.operator for message in record.messages]}")
    backward(model)
    expect_same(gradients(network), expected)


@check
def averages_are_there_when_backward_returns(wrap: Wrap) -> None:
    """The loop may clip and step at once, also when the gradients are large and take their time."""
    network = nn.Linear(1024, 512, bias=False)
    model = wrap(network, bucket_cap_mb=0.5)
    model(torch.full((1, 1024), 1.0 + dist.get_rank())).sum().backward()
    expected = 1 + sum(range(dist.get_world_size())) / dist.get_world_size()
    expect_same(gradients(network), [torch.full((512, 1024), expected)])
