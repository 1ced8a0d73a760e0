"""ddp/by_hand/drop_in: what its parts do together, after errors, and when the wrapper is gone; a program of two ranks each."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint

from common.distributed.process_group import process_group
from ddp.by_hand import DistributedDataParallel, HandwrittenDistributedDataParallel
from ddp.by_hand.drop_in.mixed_precision import MixedPrecision
from ddp.conformance.networks import Branches, one_pass
from ddp.conformance.recorder import Recorder
from ddp.conformance.tools import (
    EACH_ALONE,
    alone,
    average,
    backward,
    error_of,
    expect_same,
    gradients,
    inputs,
    layers,
    loss_of,
    of_all_ranks,
)
from tests.support.launch import run_ranks

PROGRAMS: list[Callable[[], None]] = []


def program(function: Callable[[], None]) -> Callable[[], None]:
    PROGRAMS.append(function)
    return function


def run(number: int) -> None:
    with process_group(timeout_s=20):
        PROGRAMS[number]()


@pytest.mark.parametrize("number", range(13), ids=lambda number: PROGRAMS[number].__name__)
def test_program(number: int) -> None:
    run_ranks(run, 2, number)


def message_of(error: Exception | None) -> str:
    assert error is not None
    return str(error)


def expect_equal_replicas(network: nn.Module) -> None:
    mine = [parameter.detach().clone() for parameter in network.parameters()]
    expect_same(mine, average(mine), "parameter")


# What is averaged


@program
def optimizers_in_backward_step_after_delayed_averages() -> None:
    network, reference = layers(3, 1000, 2000), layers(3, 1000, 2000)  # so large that the average takes a while
    first, *_, weight, bias = network.parameters()
    delayed = [("2.weight", weight), ("2.bias", bias)]
    _apply_optimizer_in_backward(torch.optim.SGD, network.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(network, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=first)
    for number in range(3):
        expected = average(alone(reference, functools.partial(backward, number=number)))
        for parameter, gradient in zip(reference.parameters(), expected, strict=True):
            parameter.data.sub_(0.1 * gradient)
        backward(model, number)
        expect_same(list(network.parameters()), list(reference.parameters()), "parameter")


def fail_once(parameter: Tensor) -> None:
    def fail(_: Tensor) -> Tensor:
        hook.remove()
        raise ArithmeticError

    hook = parameter.register_hook(fail)


@program
def a_backward_pass_that_failed_may_be_repeated_without_a_forward_pass() -> None:
    for engine, failing in itertools.product((HandwrittenDistributedDataParallel, DistributedDataParallel), range(4)):
        network = layers(3, 5, 2)
        expected = average(alone(network))
        model = engine(network, bucket_cap_mb=EACH_ALONE)
        backward(model)
        loss = loss_of(model(inputs()))
        fail_once(list(network.parameters())[failing])
        with contextlib.suppress(ArithmeticError):
            loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        expect_same(gradients(network), expected)


@program
def what_was_accumulated_is_averaged_though_unused_buckets_are_skipped() -> None:
    for as_view in (True, False):
        network = Branches(2)
        first = average(alone(network, one_pass(1, 0))[:2]) + average(alone(network, one_pass(0, 1))[2:])
        model = DistributedDataParallel(
            network,
            find_unused_parameters=True,
            skip_all_reduce_unused_params=True,
            gradient_as_bucket_view=as_view,
            bucket_cap_mb=EACH_ALONE,
        )
        one_pass(7, 0, 1)(model)  # an older average, of other values
        model.zero_grad()
        with model.no_sync():
            one_pass(0, 1)(model)
        one_pass(1, 0)(model)
        expect_same(gradients(network), first)
        # Where nothing was accumulated, nothing is sent, and what is there stays.
        for parameter in network.branches[1].parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(5.0)
        with Recorder() as record:
            one_pass(2, 0)(model)
        assert len(record.gradients) == 2, record.messages
        assert all((p.grad == 5.0).all() for p in network.branches[1].parameters())  # type: ignore[union-attr]


@program
def another_process_group_is_that_of_mixed_precision_too() -> None:
    network = layers(3, 5, 2)
    model = DistributedDataParallel(network, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    groups = [dist.new_group([rank]) for rank in range(2)]
    group = groups[dist.get_rank()]
    assert isinstance(group, dist.ProcessGroup)
    model._update_process_group(group)
    with Recorder() as record:
        backward(model)
    assert record.gradients
    mine = of_all_ranks([g.tolist() for g in gradients(network) if g is not None])
    assert mine[0] != mine[1]


@program
def a_communication_hook_sees_gradients_with_the_strides_of_their_parameters() -> None:
    seen: list[bool] = []

    def hook(_: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            seen.append(gradient.stride() == parameter.stride() and torch.equal(gradient, parameter.grad))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
    model = DistributedDataParallel(network)
    model.register_comm_hook(None, hook)
    loss_of(model(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last))).backward()
    assert seen == [True] * 4


@program
def parameters_of_every_kind_may_be_the_only_ones() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    model = DistributedDataParallel(embedding, find_unused_parameters=True)
    model(torch.tensor([dist.get_rank()])).sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.to_dense().tolist() == [[0.5, 0.5]] * 2 + [[0.0, 0.0]] * 3
    network = layers(3, 5, 2)
    expected = average(alone(network))
    model = DistributedDataParallel(
        network, delay_all_reduce_named_params=[], param_to_hook_all_reduce=next(network.parameters())
    )
    backward(model)
    expect_same(gradients(network), expected)


@program
def tied_weights_are_cast_together_in_mixed_precision() -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    network[1].weight = network[0].weight
    model = DistributedDataParallel(network, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    output = model(inputs())
    assert output.dtype == torch.bfloat16
    loss_of(output).backward()
    found = gradients(network)
    expect_same(found, average([gradient for gradient in found if gradient is not None]))


@program
def a_copy_can_be_made_after_optimizers_have_stepped_in_backward() -> None:
    network = layers(3, 5, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, network.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(network)
    backward(model)
    copied = copy.deepcopy(model)
    backward(copied)
    backward(model)
    expect_equal_replicas(network)
    found = gradients(copied.module)
    expect_same(found, average([gradient for gradient in found if gradient is not None]))


# What is refused


@program
def layers_below_a_checkpoint_in_a_hidden_output_are_not_left_alone() -> None:
    class Hidden:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.within = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Hidden:
            return Hidden(checkpoint(self.within, self.below(x), use_reentrant=True))

    for engine in (HandwrittenDistributedDataParallel, DistributedDataParallel):
        model = engine(Network(), find_unused_parameters=True)
        error = error_of(lambda: model(inputs()).value.square().sum().backward())  # noqa: B023
        assert "became ready after the gradients were averaged" in message_of(error), error


@program
def replaced_parameters_are_named_though_unused_ones_are_allowed() -> None:
    network = layers(3, 5, 2)
    model = DistributedDataParallel(network, find_unused_parameters=True)
    backward(model)
    network.load_state_dict({name: p.clone() for name, p in network.state_dict().items()}, assign=True)
    error = error_of(lambda: backward(model))
    assert "4 parameters were replaced after wrapping: 0.weight" in message_of(error)
    model = DistributedDataParallel(network, find_unused_parameters=True)
    network[2] = nn.Linear(5, 2)
    error = error_of(lambda: backward(model))
    assert "2 parameters were replaced after wrapping: 2.weight, 2.bias" in message_of(error)


@program
def a_block_of_join_says_what_it_cannot_do_and_ends_after_errors() -> None:
    model = DistributedDataParallel(Branches(2), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    assert "skip_all_reduce_unused_params=False" in message_of(error_of(model.join))
    model = DistributedDataParallel(layers(3, 5, 2), find_unused_parameters=True)
    assert isinstance(model.join(), Join)
    with contextlib.suppress(RuntimeError), model.join(throw_on_early_termination=True):
        for number in range(1 + dist.get_rank()):
            backward(model, number)
    if dist.get_rank() == 0:  # announces nothing, so it waits for nobody
        with torch.no_grad():
            model(inputs())


# What is left behind


@program
def nothing_outlives_its_use() -> None:
    class KeepsItsOutput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.output = self.layer(x)
            return self.output  # type: ignore[no-any-return]

    for engine in (HandwrittenDistributedDataParallel, DistributedDataParallel):
        network = KeepsItsOutput()
        model = engine(network)
        model(inputs())
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None

    first, last = nn.Linear(3, 3), nn.Linear(3, 2)
    model = DistributedDataParallel(
        nn.Sequential(nn.Embedding(4, 3, sparse=True), first, last),
        delay_all_reduce_named_params=[("2.bias", last.bias)],
        param_to_hook_all_reduce=next(first.parameters()),
    )
    old = weakref.ref(model.reducer)
    model._set_static_graph()
    gc.collect()
    assert old() is None


@program
def a_static_graph_overlaps_on_a_rank_that_had_no_batch_at_first() -> None:
    network = layers(3, 64, 64, 2)
    model = DistributedDataParallel(network, static_graph=True, bucket_cap_mb=EACH_ALONE)
    with model.join():
        for number in range(dist.get_rank() * 2):
            backward(model, number)
            model.zero_grad()
    backward(model)
    model.zero_grad()
    expected = average(alone(network))
    with Recorder() as record:
        backward(model)
    expect_same(gradients(network), expected)
    products = [at for at, operator in enumerate(record.operators) if operator == "aten.mm"]
    assert sum(message.at < products[-1] for message in record.gradients) >= 2


assert len(PROGRAMS) == 13
