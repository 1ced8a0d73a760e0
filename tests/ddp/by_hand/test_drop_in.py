"""ddp/by_hand/drop_in: what its parts do together, after errors, and when the wrapper is gone; as programs of two ranks."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils import prune

from ddp.by_hand import DistributedDataParallel, HandwrittenDistributedDataParallel
from ddp.by_hand.drop_in.mixed_precision import MixedPrecision
from ddp.conformance import differences
from ddp.conformance.networks import Branches
from ddp.conformance.recorder import Recorder
from ddp.conformance.tools import (
    EACH_ALONE,
    alone,
    average,
    backward,
    error_of,
    expect_averages,
    expect_same,
    gradients,
    inputs,
    layers,
    loss_of,
    of_all_ranks,
    one_pass,
    passes,
)
from tests.support.on_ranks import as_tests


def message_of(error: Exception | None) -> str:
    assert error is not None
    return str(error)


# What is averaged


def optimizers_in_backward_step_after_delayed_averages() -> None:
    network, reference = layers(3, 1000, 2000), layers(3, 1000, 2000)  # so large that the average takes a while
    first, *_, weight, bias = network.parameters()
    delayed = [("2.weight", weight), ("2.bias", bias)]
    _apply_optimizer_in_backward(torch.optim.SGD, network.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(network, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=first)
    for number in range(3):
        expected = average(alone(reference, one_pass(number)))
        for parameter, gradient in zip(reference.parameters(), expected, strict=True):
            parameter.data.sub_(0.1 * gradient)
        backward(model, number)
        expect_same(list(network.parameters()), list(reference.parameters()), "parameter")


def what_was_accumulated_is_averaged_though_unused_buckets_are_skipped() -> None:
    for as_view in (True, False):
        network = Branches(2)
        first = average([*alone(network, one_pass(1, 0))[:2], *alone(network, one_pass(0, 1))[2:]])
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
    first, second = of_all_ranks([g.tolist() for g in gradients(network) if g is not None])
    assert first != second


def parameters_of_every_kind_may_be_the_only_ones() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    model = DistributedDataParallel(embedding, find_unused_parameters=True)
    model(torch.tensor([dist.get_rank()])).sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.to_dense().tolist() == [[0.5, 0.5]] * 2 + [[0.0, 0.0]] * 3
    network = layers(3, 5, 2)
    engine: Any = DistributedDataParallel
    first = next(network.parameters())
    expect_averages(engine, network, delay_all_reduce_named_params=[], param_to_hook_all_reduce=first)


def mixed_precision_sums_in_its_reduce_dtype() -> None:
    network = layers(3, 5, 2)
    sums = [gradient.bfloat16() for gradient in alone(network) if gradient is not None]
    for one in sums:
        dist.all_reduce(one)
    backward(DistributedDataParallel(network, mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16)))
    expect_same(gradients(network), [one.float() / 2 for one in sums])


def tied_weights_are_cast_together_in_mixed_precision() -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    network[1].weight = network[0].weight
    model = DistributedDataParallel(network, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    output = model(inputs())
    assert output.dtype == torch.bfloat16
    loss_of(output).backward()
    expect_same(gradients(network), average(gradients(network)))


def a_copy_can_be_made_after_optimizers_have_stepped_in_backward() -> None:
    network = layers(3, 5, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, network.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(network)
    backward(model)
    copied = copy.deepcopy(model)
    backward(copied)
    backward(model)
    weights = [parameter.detach() for parameter in network.parameters()]
    expect_same(weights, average(weights), "parameter")
    expect_same(gradients(copied), average(gradients(copied)))


def delayed_averages_are_of_what_is_in_the_gradients() -> None:
    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = layers(3, 3), layers(3, 2, seed=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).tanh())  # type: ignore[no-any-return]

    for trigger in ("first.0.weight", "last.0.weight"):  # the second is ready before what it is to wait for
        network = Line()
        named = dict(network.named_parameters())
        delayed = [(name, named[name]) for name in named if not name.startswith(trigger.partition(".")[0])]
        model = DistributedDataParallel(
            network, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=named[trigger]
        )
        for create_graph in (False, True):
            expected = average(alone(network))
            network.zero_grad()
            loss = loss_of(model(inputs()))
            network.zero_grad()  # between forward and backward
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a cycle
                loss.backward(create_graph=create_graph)
            expect_same(gradients(network), expected)
        network.zero_grad()
        twice = average(alone(network, passes(0, 1)))
        losses = [loss_of(model(inputs(number))) for number in range(2)]
        for loss in losses:
            loss.backward()
        expect_same(gradients(network), twice)


def a_failed_pass_leaves_nothing_to_the_next_one() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rows = nn.Linear(3, 1, bias=False), nn.Embedding(2, 1, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.square()) + self.rows(torch.tensor([0]))  # type: ignore[no-any-return]

    def penalty(output: Tensor, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return slope.square().sum()

    network, x = Both(), inputs().requires_grad_()
    expected = average(alone(network.layer, lambda layer: penalty(layer(x.square()), x).backward()))
    model = DistributedDataParallel(network)
    output = model(x)

    def fail(_: Tensor) -> Tensor:
        raise ArithmeticError

    hook = next(network.layer.parameters()).register_hook(fail)
    with contextlib.suppress(ArithmeticError):
        output.sum().backward(retain_graph=True)
    hook.remove()
    network.zero_grad()
    penalty(output, x).backward()
    expect_same(gradients(network.layer), expected)


def pruned_parameters_were_not_replaced() -> None:
    network = layers(3, 5, 2)
    model = DistributedDataParallel(network, find_unused_parameters=True)
    prune.l1_unstructured(network[0], "weight", 0.5)  # weight is now computed from weight_orig
    backward(model)
    network[2].register_parameter("bias", None)
    network.zero_grad()
    backward(model)
    expect_same(gradients(network), average(gradients(network)))


def numbers_and_names_are_torch_s_or_on_the_page_of_differences() -> None:
    page = " ".join((differences.__doc__ or "").split())
    network, ours = (
        Branches(2),
        DistributedDataParallel(Branches(2), find_unused_parameters=True, bucket_cap_mb=EACH_ALONE),
    )
    names = set(dir(TorchDDP(network))) - set(dir(ours)) - set(dir(network))
    missing = {name for name in names if not name.startswith("_")}
    assert all(f"`{name}`" in page for name in missing), missing
    ours.register_comm_hook(None, default_hooks.allreduce_hook)
    with torch.profiler.profile() as profile:
        for _ in range(3):
            one_pass(0, 0)(ours)
    assert sum("search_unused_parameters" in event.name for event in profile.events()) == 3
    data = ours._get_ddp_logging_data()
    assert (data["iteration"], data["num_buckets_reduced"], data["comm_hook"]) == (2, 4, "allreduce_hook")
    assert "should be called before training loop starts" in message_of(error_of(ours._set_static_graph))


# What is refused


def replaced_parameters_are_named_though_unused_ones_are_allowed() -> None:
    network = layers(3, 5, 2)
    model = DistributedDataParallel(network, find_unused_parameters=True)
    backward(model)
    network[2] = nn.Linear(5, 2)
    error = error_of(lambda: backward(model))
    assert "2 parameters were converted or replaced after they were wrapped: 2.weight, 2.bias" in message_of(error)


def a_block_of_join_says_what_it_cannot_do_and_ends_after_errors() -> None:
    model = DistributedDataParallel(Branches(2), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    assert "skip_all_reduce_unused_params=False" in message_of(error_of(model.join))
    error = error_of(lambda: DistributedDataParallel(nn.Embedding(3, 2, sparse=True), mixed_precision=MixedPrecision()))
    assert "use sparse=False or autocast" in message_of(error)
    model = DistributedDataParallel(layers(3, 5, 2), find_unused_parameters=True)
    assert isinstance(model.join(), Join)
    with contextlib.suppress(RuntimeError), model.join(throw_on_early_termination=True):
        for number in range(1 + dist.get_rank()):
            backward(model, number)
    if dist.get_rank() == 0:  # announces nothing, so it waits for no other rank
        with torch.no_grad():
            model(inputs())


# What is left behind


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


failed, test_program = as_tests(
    [
        optimizers_in_backward_step_after_delayed_averages,
        delayed_averages_are_of_what_is_in_the_gradients,
        a_failed_pass_leaves_nothing_to_the_next_one,
        pruned_parameters_were_not_replaced,
        what_was_accumulated_is_averaged_though_unused_buckets_are_skipped,
        another_process_group_is_that_of_mixed_precision_too,
        parameters_of_every_kind_may_be_the_only_ones,
        mixed_precision_sums_in_its_reduce_dtype,
        tied_weights_are_cast_together_in_mixed_precision,
        a_copy_can_be_made_after_optimizers_have_stepped_in_backward,
        numbers_and_names_are_torch_s_or_on_the_page_of_differences,
        replaced_parameters_are_named_though_unused_ones_are_allowed,
        a_block_of_join_says_what_it_cannot_do_and_ends_after_errors,
        nothing_outlives_its_use,
        a_static_graph_overlaps_on_a_rank_that_had_no_batch_at_first,
    ]
)
