"""ddp/by_hand/reducer.py: backward passes that fail, are nested, or find other gradients than they left; and what is left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import io
import itertools
import shutil
import time
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ddp.by_hand import HandwrittenDistributedDataParallel
from ddp.conformance.expectations import error_of, expect_averages, expect_same
from ddp.conformance.networks import layers
from ddp.conformance.steps import EACH_ALONE, alone, average, backward, gradients, inputs, loss_of, one_pass
from tests.support.on_ranks import as_tests, failures

Wrap: Any = HandwrittenDistributedDataParallel


def fail_once(parameter: Tensor) -> None:
    def fail(_: Tensor) -> Tensor:
        hook.remove()
        raise ArithmeticError

    hook = parameter.register_hook(fail)


def a_backward_pass_that_failed_may_be_repeated_without_a_forward_pass() -> None:
    for failing, static_graph in itertools.product(range(4), (False, True)):
        network = layers(3, 5, 2)
        expected = average(alone(network))
        model = Wrap(network, bucket_cap_mb=EACH_ALONE, static_graph=static_graph)
        backward(model)
        loss = loss_of(model(inputs()))
        fail_once(list(network.parameters())[failing])
        with contextlib.suppress(ArithmeticError):
            loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        expect_same(gradients(network), expected)


def two_reentrant_checkpoints(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    return checkpoint(second, checkpoint(first, x, use_reentrant=True), use_reentrant=True)  # type: ignore[no-any-return]


class Hidden:
    """An output of a class of its own, in which no wrapper finds the tensor."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class InPlace(nn.Module):
    """Two reentrant checkpoints, and an output that is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers(3, 3), layers(3, 4, seed=1)

    def forward(self, x: Tensor) -> Tensor:
        return two_reentrant_checkpoints(x, self.first, self.second)[:, :2]


class HidesItsOutput(InPlace):
    """The same, hidden, above a layer that is in no checkpoint."""

    def forward(self, x: Tensor) -> Any:
        return Hidden(super().forward(self.first(x)))


def masked(network: nn.Module, number: int = 0) -> None:
    """Forward, a change of the output in place, and backward."""
    output = network(inputs(number).requires_grad_())
    output.masked_fill_(torch.tensor([True, False]), 0.5)
    loss_of(output).backward()


def an_output_that_is_a_view_may_be_changed_in_place() -> None:
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        steps = [functools.partial(masked, number=number) for number in range(3)]
        expect_averages(Wrap, InPlace(), steps=steps, **options)


def checkpoints_in_a_hidden_output_are_not_taken_for_the_whole_pass() -> None:
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        model = Wrap(HidesItsOutput(), **options)
        error = error_of(lambda: model(inputs()).value.square().sum().backward())  # noqa: B023
        assert "the backward pass of a reentrant checkpoint came before" in str(error), error


def parameters_that_were_converted_are_named_also_if_they_were_converted_back() -> None:
    for find_unused, part in itertools.product((False, True), ("", "0")):
        network = layers(3, 5, 2)
        model = Wrap(network, find_unused_parameters=find_unused)
        network.get_submodule(part).double().float()
        error = error_of(lambda: backward(model))  # noqa: B023
        number = 4 if part == "" else 2
        assert f"{number} parameters were converted or replaced after they were wrapped" in str(error), error


def gradients_that_were_moved_are_averaged_where_they_are() -> None:
    network = layers(3, 5, 2)
    model = Wrap(network, gradient_as_bucket_view=True)
    for number in range(4):
        expected = average(alone(network, functools.partial(backward, number=number)))
        backward(model, number)
        expect_same(gradients(network), expected)
        for parameter in network.parameters():
            assert parameter.grad is not None
            parameter.grad.data = parameter.grad.data * 2  # as some recipes of pruning do
        network.zero_grad()


def two_wrappers_of_a_layer_are_not_mixed_up_in_one_pass() -> None:
    for first in range(2):
        shared = layers(3, 3)
        models = [
            Wrap(nn.Sequential(shared, head), gradient_as_bucket_view=True)
            for head in (nn.Linear(3, 2), nn.Linear(3, 2))
        ]
        for model in models:  # one after the other they may take part
            loss_of(model(inputs())).backward()
        shared.zero_grad()
        losses = [loss_of(models[index](inputs())) for index in (first, 1 - first)]
        error = error_of(torch.stack(losses).sum().backward)
        assert "two wrappers of the same parameters take part in one backward pass" in str(error), error


def gradients_that_are_zeroed_after_an_error_stay_zero() -> None:
    network = layers(3, 5, 2)
    model = Wrap(network, bucket_cap_mb=EACH_ALONE, gradient_as_bucket_view=True)
    backward(model)
    network.zero_grad(set_to_none=False)
    expected = average(alone(network))
    loss = loss_of(model(inputs()))
    fail_once(next(network.parameters()))
    if dist.get_rank() == 1:
        time.sleep(0.3)  # its sums reach rank 0 after that one has zeroed its gradients
    with contextlib.suppress(ArithmeticError):
        loss.backward()
    network.zero_grad(set_to_none=False)
    backward(model)
    expect_same(gradients(network), expected)


def outputs_may_be_dataclasses_of_every_kind() -> None:
    @dataclasses.dataclass(slots=True)
    class Slots:
        value: Tensor
        around: Any = None

    class Network(nn.Sequential):
        def forward(self, x: Tensor) -> Slots:
            output = Slots(super().forward(x))  # type: ignore[no-untyped-call]
            output.around = [output]
            return output

    expect_averages(Wrap, Network(nn.Linear(3, 2)), steps=[lambda model: loss_of(model(inputs()).value).backward()])


def trained_tensors_need_not_be_parameters() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        file = io.BytesIO()
        torch.jit.save(torch.jit.script(nn.Linear(3, 2)), file)
        file.seek(0)
        loaded = torch.jit.load(file)
    model = Wrap(nn.Sequential(loaded, nn.Linear(2, 2)))
    backward(model)
    assert len(gradients(model)) == 4
    expect_same(gradients(model), average(gradients(model)))


def passes_are_averaged_or_not_as_their_forward_passes_were() -> None:
    for as_view in (True, False):
        network = layers(3, 5, 2)
        own, expected = alone(network, one_pass(1)), average(alone(network))
        model = Wrap(network, gradient_as_bucket_view=as_view)
        with model.no_sync():
            local = loss_of(model(inputs(1)))
        backward(model)
        local.backward()
        expect_same(gradients(network), [one + other for one, other in zip(own, expected, strict=True)])
        network.zero_grad()
        loss = loss_of(model(inputs()))
        for _ in range(2):
            loss.backward(retain_graph=True)
        expect_same(gradients(network), [2 * gradient for gradient in expected])
        network.zero_grad()
        loss_of(model(inputs()))  # is thrown away, and makes up for nothing
        with model.no_sync():
            backward(model, 1)
        expect_same(gradients(network), own)


def one_head_after_the_other(model: nn.Module) -> None:
    first, second = map(loss_of, model(inputs()))
    first.backward(retain_graph=True)
    second.backward()


def two_outputs_may_have_a_backward_pass_each() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = layers(3, 4), nn.ModuleList([layers(4, 2), layers(4, 1)])

        def forward(self, x: Tensor) -> Any:
            return [head(self.body(x)) for head in self.heads]

    for as_view in (True, False):
        options = {"find_unused_parameters": True, "gradient_as_bucket_view": as_view}
        expect_averages(Wrap, Heads(), steps=[one_head_after_the_other] * 3, **options)


def keeps_a_graph(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a cycle
        loss_of(model(inputs())).backward(create_graph=True)


def gradients_may_have_a_graph() -> None:
    for as_view in (True, False):
        expect_averages(Wrap, layers(3, 5, 2), steps=[keeps_a_graph] * 2, gradient_as_bucket_view=as_view)


def a_wrapper_in_a_reentrant_checkpoint_averages_if_backward_is_to() -> None:
    network = layers(3, 5, 2)
    own = alone(network)
    model = Wrap(network, bucket_cap_mb=EACH_ALONE)
    for around, expected in ((contextlib.nullcontext(), average(own)), (model.no_sync(), own)):
        network.zero_grad()
        with set_checkpoint_early_stop(False):
            output = checkpoint(model, inputs().requires_grad_(), use_reentrant=True)
            with around:  # the forward pass that is repeated here is the only one with gradients
                loss_of(output).backward()
        expect_same(gradients(network), expected)


def a_checkpoint_of_the_wrapper_averages_as_the_first_forward_pass_was_to() -> None:
    """The wrapper's forward pass is repeated in backward, under no_sync."""
    network = layers(3, 5, 2)
    expected = average(alone(network))
    model = Wrap(network, bucket_cap_mb=EACH_ALONE)
    with set_checkpoint_early_stop(False):  # so that the repeated forward pass comes to its end
        loss = loss_of(checkpoint(model, inputs(), use_reentrant=False))
        with model.no_sync():
            loss.backward()
    expect_same(gradients(network), expected)


def pruned_parameters_were_not_replaced() -> None:
    network = layers(3, 5, 2)
    model = Wrap(network, find_unused_parameters=True)
    prune.l1_unstructured(network[0], "weight", 0.5)  # weight is now computed from weight_orig
    backward(model)
    network[2].register_parameter("bias", None)
    network.zero_grad()
    backward(model)
    expect_same(gradients(network), average(gradients(network)))


def a_module_that_keeps_its_output_does_not_keep_its_wrapper() -> None:
    class KeepsItsOutput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.output = self.layer(x)
            return self.output  # type: ignore[no-any-return]

    network = KeepsItsOutput()
    model = Wrap(network)
    model(inputs())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def compiled(backend: str) -> None:
    for around in (False, True):
        network = layers(3, 5, 2)
        own, expected = alone(network), average(alone(network))
        model: Any = Wrap(network if around else torch.compile(network, backend=backend), bucket_cap_mb=EACH_ALONE)
        model = torch.compile(model, backend=backend) if around else model
        for _ in range(3):
            network.zero_grad()
            backward(model)
            expect_same(gradients(network), expected)
        network.zero_grad()
        with model.no_sync():
            backward(model)
        expect_same(gradients(network), own)


def modules_and_wrappers_may_be_compiled() -> None:
    compiled("aot_eager")


def with_inductor() -> None:
    compiled("inductor")


failed, test_program = as_tests(
    [
        a_backward_pass_that_failed_may_be_repeated_without_a_forward_pass,
        an_output_that_is_a_view_may_be_changed_in_place,
        checkpoints_in_a_hidden_output_are_not_taken_for_the_whole_pass,
        parameters_that_were_converted_are_named_also_if_they_were_converted_back,
        gradients_that_were_moved_are_averaged_where_they_are,
        two_wrappers_of_a_layer_are_not_mixed_up_in_one_pass,
        gradients_that_are_zeroed_after_an_error_stay_zero,
        outputs_may_be_dataclasses_of_every_kind,
        trained_tensors_need_not_be_parameters,
        passes_are_averaged_or_not_as_their_forward_passes_were,
        two_outputs_may_have_a_backward_pass_each,
        gradients_may_have_a_graph,
        a_wrapper_in_a_reentrant_checkpoint_averages_if_backward_is_to,
        a_checkpoint_of_the_wrapper_averages_as_the_first_forward_pass_was_to,
        pruned_parameters_were_not_replaced,
        a_module_that_keeps_its_output_does_not_keep_its_wrapper,
    ]
)


def test_torch_compile() -> None:
    """Modules and wrappers that dynamo and AOT autograd trace have averaged gradients."""
    assert failures([modules_and_wrappers_may_be_compiled], fresh=True) == {}  # torch 2.11 leaves a thread


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_torch_compile_with_inductor() -> None:
    """Modules and wrappers that inductor compiles have averaged gradients."""
    assert failures([with_inductor], fresh=True) == {}  # it leaves threads that compile
