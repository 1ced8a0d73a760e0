"""ddp/by_hand/wrapper.py: when gradients are averaged, what is sent when, and which errors are raised."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import shutil
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from common.distributed.process_group import process_group
from ddp.all_reduce.backend import Backend
from ddp.all_reduce.base import AllReduce, Pending
from ddp.by_hand import DistributedDataParallel as DropIn
from ddp.by_hand.wrapper import HandwrittenDistributedDataParallel
from tests.ddp.by_hand.wrappers import Failing, Images, loss_of
from tests.support.launch import run_ranks

EACH_ALONE = 1e-6  # MiB: every parameter has a bucket of its own
# Large gradients go to their bucket one by one, small ones together.
WIDTHS = [(3, 5, 2), (3, 6000, 3)]
SETTINGS = list(itertools.product((True, False), WIDTHS))  # as_view, widths


class Recorder(AllReduce):
    """The backend's all-reduce, which records the moments at which sums start."""

    def __init__(self) -> None:
        super().__init__()
        self._backend = Backend()
        self.events: list[tuple[str, int]] = []

    def run(self, buffer: Tensor) -> None:
        self._backend.run(buffer)

    def start(self, buffer: Tensor) -> Pending:
        self.events.append(("start", buffer.numel()))
        return self._backend.start(buffer)

    def starts(self) -> list[int]:
        """The sizes of what was sent since the last call."""
        events, self.events = self.events, []
        return [size for event, size in events if event == "start"]


def layers(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(n, m) for n, m in itertools.pairwise(widths)])


def inputs(number: int = 0, width: int = 3) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


def grads(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def alone(network: nn.Module, backward: Callable[[nn.Module], None]) -> list[Tensor]:
    """What ``backward`` leaves in the gradients without any wrapper, on this rank; zeros for nothing."""
    network = copy.deepcopy(network)
    network.zero_grad()
    backward(network)
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in network.parameters()]


def average(gradients: list[Tensor]) -> list[Tensor]:
    for gradient in gradients:
        dist.all_reduce(gradient)
    return [gradient / dist.get_world_size() for gradient in gradients]


def assert_same(ours: list[Tensor | None], expected: list[Tensor]) -> None:
    torch.testing.assert_close(ours, expected)


def all_ranks_have(value: Any) -> Any:
    """:returns: the value; :raises AssertionError: if another rank has another one"""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert values == [value] * len(values)
    return value


# When it synchronizes


def sum_of(*numbers: int) -> Callable[[nn.Module], None]:
    """A backward pass over the sum of the losses of these batches."""

    def backward(network: nn.Module) -> None:
        torch.stack([loss_of(network(inputs(number))) for number in numbers]).sum().backward()

    return backward


def synchronized_passes() -> None:
    with process_group(timeout_s=60):
        for as_view, widths in SETTINGS:
            synchronized_passes_with(as_view, widths)


def synchronized_passes_with(as_view: bool, widths: tuple[int, ...]) -> None:
    network, record = layers(*widths), Recorder()
    model = HandwrittenDistributedDataParallel(
        network, bucket_cap_mb=EACH_ALONE, gradient_as_bucket_view=as_view, all_reduce=record
    )
    buckets = 4

    # A forward pass under no_sync, its backward pass outside: not synchronized.
    with model.no_sync():
        loss = loss_of(model(inputs()))
    loss.backward()
    assert record.starts() == []
    assert_same(grads(network), alone(network, sum_of(0)))
    network.zero_grad()

    # The other way around: synchronized.
    loss = loss_of(model(inputs()))
    with model.no_sync():
        loss.backward()
    assert len(record.starts()) == buckets
    expected = average(alone(network, sum_of(0)))
    assert_same(grads(network), expected)
    network.zero_grad()

    # An error leaves no_sync behind, however deep.
    with contextlib.suppress(ValueError), model.no_sync():
        with model.no_sync():
            pass
        assert not model.require_backward_grad_sync
        raise ValueError
    sum_of(0)(model)
    assert len(record.starts()) == buckets
    assert_same(grads(network), expected)
    network.zero_grad()

    # Two forward passes, one backward pass.
    sum_of(1, 2)(model)
    assert len(record.starts()) == buckets
    assert_same(grads(network), average(alone(network, sum_of(1, 2))))
    network.zero_grad()

    # Two forward passes, then their backward passes, in reverse: both are synchronized. (With torch's DDP, one is.)
    first, second = loss_of(model(inputs(1))), loss_of(model(inputs(2)))
    second.backward()
    assert_same(grads(network), average(alone(network, sum_of(2))))
    first.backward()
    assert_same(grads(network), average(alone(network, sum_of(1, 2))))
    assert len(record.starts()) == 2 * buckets
    network.zero_grad()

    # The same with one that was not to be synchronized: it is not.
    with model.no_sync():
        first = loss_of(model(inputs(1)))
    loss_of(model(inputs(2))).backward()
    first.backward()
    both = zip(alone(network, sum_of(1)), average(alone(network, sum_of(2))), strict=True)
    assert_same(grads(network), [mine + everyones for mine, everyones in both])
    assert len(record.starts()) == buckets
    network.zero_grad()

    # Two backward passes through one graph.
    loss = loss_of(model(inputs()))
    loss.backward(retain_graph=True)
    loss.backward()
    assert_same(grads(network), [2 * gradient for gradient in expected])
    assert len(record.starts()) == 2 * buckets
    network.zero_grad()

    # A forward pass without gradients in between, and one whose output is thrown away.
    loss = loss_of(model(inputs()))
    with torch.no_grad():
        model(inputs(3))
    model(inputs(4))
    loss.backward()
    assert_same(grads(network), expected)
    assert len(record.starts()) == buckets


def test_backward_passes_whose_forward_pass_was_not_under_no_sync_are_synchronized() -> None:
    run_ranks(synchronized_passes, 2)


class Masked(nn.Module):
    """A buffer that backward needs."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = layers(3, 2)
        self.register_buffer("mask", torch.ones(2))

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * self.mask


def buffers_in_between() -> None:
    with process_group(timeout_s=60):
        network = Masked()
        model = HandwrittenDistributedDataParallel(network)
        expected = average(alone(network, sum_of(1, 2)))
        network.mask *= 1 + dist.get_rank()
        sum_of(1, 2)(model)
        assert_same(grads(network), expected)
        assert network.mask.tolist() == [1, 1]


def test_buffers_are_sent_between_two_forward_passes_and_their_backward_pass() -> None:
    run_ranks(buffers_in_between, 2)


class Kept(nn.Module):
    """Its loss is an attribute; its output has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(3, 5, 2)
        self.loss = torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        self.loss = loss_of(self.layers(x))
        return self.loss.detach()


def kept_losses() -> None:
    with process_group(timeout_s=60):
        network = Kept()

        def backward(module: nn.Module) -> None:
            module(inputs())
            cast(Kept, getattr(module, "module", module)).loss.backward()

        expected = average(alone(network, backward))
        for find_unused in (False, True):
            model = HandwrittenDistributedDataParallel(network, find_unused_parameters=find_unused)
            for _ in range(3):
                network.zero_grad()
                backward(model)
                assert_same(grads(network), expected)


def test_a_loss_that_is_kept_in_an_attribute_of_the_module() -> None:
    run_ranks(kept_losses, 2)


def gradients_of_gradients() -> None:
    def penalty(module: nn.Module, create_graph: bool) -> Tensor:
        x = inputs().requires_grad_()
        loss = loss_of(module(x))
        (slope,) = torch.autograd.grad(loss, x, create_graph=create_graph)
        return loss + slope.square().sum()

    with process_group(timeout_s=60):
        for find_unused, static_graph in ((False, False), (True, False), (False, True)):
            network, record = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), Recorder()
            model = HandwrittenDistributedDataParallel(
                network, find_unused_parameters=find_unused, static_graph=static_graph, all_reduce=record
            )
            for _ in range(3):
                network.zero_grad()
                penalty(model, create_graph=False)
                assert record.starts() == []
                assert grads(network) == [None] * 4
                penalty(model, create_graph=True).backward()
                assert len(record.starts()) == 1
                assert_same(grads(network), average(alone(network, lambda module: penalty(module, True).backward())))


def test_gradients_of_the_inputs_alone_leave_those_of_the_parameters_alone() -> None:
    run_ranks(gradients_of_gradients, 2)


def graphs_of_gradients() -> None:
    with process_group(timeout_s=60), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph")
        for as_view, widths in SETTINGS:
            network = layers(*widths)
            model = HandwrittenDistributedDataParallel(
                network, bucket_cap_mb=EACH_ALONE, gradient_as_bucket_view=as_view
            )
            expected = average(alone(network, sum_of(0)))
            for _ in range(3):
                network.zero_grad()
                loss_of(model(inputs())).backward(create_graph=True)
                torch.testing.assert_close([p.grad for p in network.parameters()], expected, check_stride=False)


def test_create_graph() -> None:
    run_ranks(graphs_of_gradients, 2)


class Fails(nn.Module):
    """Whose backward pass ends in the middle, when told to."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.lower, self.upper = layers(inputs, width), layers(width, outputs)
        self.fail = False

    def forward(self, x: Tensor) -> Any:
        x = self.lower(x)
        return self.upper(Failing.apply(x) if self.fail else x)


def interrupted() -> None:
    with process_group(timeout_s=60):
        for (as_view, widths), static_graph, fail_first in itertools.product(SETTINGS, (True, False), (True, False)):
            network = Fails(*widths)
            model = HandwrittenDistributedDataParallel(
                network, bucket_cap_mb=EACH_ALONE, gradient_as_bucket_view=as_view, static_graph=static_graph
            )
            expected = average(alone(network, sum_of(0)))
            for step in range(6):
                network.fail = (step % 2 == 0) == fail_first
                network.zero_grad(set_to_none=step < 4)
                if not network.fail:
                    sum_of(0)(model)
                    assert_same(grads(network), expected)
                    continue
                with pytest.raises(ArithmeticError, match="in the middle"):
                    sum_of(0)(model)
                if step > 2:  # whatever follows, also a pass that is not synchronized
                    network.fail = False
                    network.zero_grad()
                    with model.no_sync():
                        sum_of(0)(model)
                    assert_same(grads(network), alone(network, sum_of(0)))


def test_training_goes_on_after_an_error_in_a_backward_pass() -> None:
    run_ranks(interrupted, 2)


def a_batch_is_skipped() -> None:
    with process_group(timeout_s=60):
        network, record = layers(3, 2), Recorder()
        model = HandwrittenDistributedDataParallel(network, all_reduce=record)
        loss_of(model(inputs()))  # is not a number, say
        with model.no_sync():
            sum_of(0)(model)
        assert record.starts() == []
        assert_same(grads(network), alone(network, sum_of(0)))
        sum_of(0)(model)
        assert_same(grads(network), [2 * gradient for gradient in average(alone(network, sum_of(0)))])
        assert record.starts() == [8]


def test_a_skipped_backward_pass_is_not_made_up_for_by_one_under_no_sync() -> None:
    run_ranks(a_batch_is_skipped, 2)


class Chooses(nn.Module):
    """Ranks use one of three layers each; or none, but there is an output all the same."""

    def __init__(self, choices: Sequence[int | None], width: int = 2) -> None:
        super().__init__()
        self.choices = choices
        self.layers = nn.ModuleList([layers(3, width) for _ in range(3)])

    def forward(self, x: Tensor) -> Any:
        choice = self.choices[dist.get_rank()]
        return x * 1.0 if choice is None else self.layers[choice](x)


def unused() -> None:
    with process_group(timeout_s=60):
        options = itertools.product((True, False), (True, False), (EACH_ALONE, 1), (2, 10_000))
        all_choices: list[list[int | None]] = [[0, 1], [1, 1], [None, 1], [2, None], [None, None]]
        for (as_view, set_to_none, bucket_cap_mb, width), choices in itertools.product(options, all_choices):
            network = Chooses(choices, width)
            model = HandwrittenDistributedDataParallel(
                network, find_unused_parameters=True, gradient_as_bucket_view=as_view, bucket_cap_mb=bucket_cap_mb
            )
            expected = average(alone(network, lambda module: loss_of(module(inputs().requires_grad_())).backward()))
            for step in range(3):
                network.zero_grad(set_to_none)
                loss_of(model(inputs().requires_grad_())).backward()
                for index, layer in enumerate(network.layers):
                    found = grads(layer)
                    if index in choices:
                        assert_same(found, expected[2 * index : 2 * index + 2])
                    else:
                        assert found == [None, None], (choices, step, index)


def test_parameters_that_some_ranks_or_all_do_not_use() -> None:
    run_ranks(unused, 2)


class Heads(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.body, self.heads = layers(3, width), nn.ModuleList([layers(width, 2), layers(width, 1)])

    def forward(self, x: Tensor) -> Any:
        x = self.body(x)
        return [head(x) for head in self.heads]


def one_head_after_the_other() -> None:
    def backward(module: nn.Module) -> None:
        first, second = map(loss_of, module(inputs()))
        first.backward(retain_graph=True)
        second.backward()

    with process_group(timeout_s=60):
        for as_view, width in itertools.product((True, False), (4, 20_000)):
            network = Heads(width)
            model = HandwrittenDistributedDataParallel(
                network, find_unused_parameters=True, gradient_as_bucket_view=as_view
            )
            expected = average(alone(network, backward))
            for _ in range(3):
                network.zero_grad()
                backward(model)
                assert_same(grads(network), expected)


def test_a_backward_pass_for_each_of_two_outputs() -> None:
    run_ranks(one_head_after_the_other, 2)


def two_wrappers() -> None:
    with process_group(timeout_s=60):
        for as_view, widths in SETTINGS:
            whole = nn.Sequential(layers(3, 4, 3), layers(*widths))
            first, second = (
                HandwrittenDistributedDataParallel(part, bucket_cap_mb=EACH_ALONE, gradient_as_bucket_view=as_view)
                for part in whole
            )
            expected = average(alone(whole, sum_of(0)))
            for _ in range(3):
                whole.zero_grad()
                loss_of(second(first(inputs()))).backward()
                assert_same(grads(whole), expected)


def test_one_wrapper_after_the_other_in_one_backward_pass() -> None:
    run_ranks(two_wrappers, 2)


# Checkpoints and compilers


class SharedByCheckpoints(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.stem, self.block, self.head = layers(3, 4), layers(4, 4), layers(4, 2)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def shared_by_checkpoints() -> None:
    with process_group(timeout_s=60):
        for use_reentrant, static_graph in ((False, False), (False, True), (True, True)):
            network = SharedByCheckpoints(use_reentrant)
            model = HandwrittenDistributedDataParallel(network, static_graph=static_graph, bucket_cap_mb=EACH_ALONE)
            expected = average(alone(network, sum_of(0)))
            for _ in range(3):
                network.zero_grad()
                sum_of(0)(model)
                assert_same(grads(network), expected)
        network = SharedByCheckpoints(use_reentrant=True)
        model = HandwrittenDistributedDataParallel(network)
        with pytest.raises(
            RuntimeError,
            match=r"the gradient of block\.0\.(weight|bias) became ready more often than expected.*static_graph=True",
        ):
            sum_of(0)(model)


def test_a_parameter_that_two_checkpoints_share() -> None:
    run_ranks(shared_by_checkpoints, 2)


def inside_a_checkpoint() -> None:
    def backward(module: nn.Module, use_reentrant: bool, around: contextlib.AbstractContextManager[None]) -> None:
        output = checkpoint(module, inputs().requires_grad_(), use_reentrant=use_reentrant)
        with around:
            loss_of(output).backward()

    with process_group(timeout_s=60), set_checkpoint_early_stop(False):
        network, record = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), Recorder()
        model = HandwrittenDistributedDataParallel(network, bucket_cap_mb=EACH_ALONE, all_reduce=record)
        expected = average(alone(network, sum_of(0)))
        # The forward pass that is repeated within the backward pass has no say in whether that is synchronized;
        # of a reentrant checkpoint, it is the only one that has.
        cases: list[tuple[bool, Any]] = [
            (False, contextlib.nullcontext()),
            (False, model.no_sync()),
            (True, contextlib.nullcontext()),
        ]
        for use_reentrant, around in cases:
            network.zero_grad()
            backward(model, use_reentrant, around)
            assert_same(grads(network), expected)
            assert len(record.starts()) == 4
        network.zero_grad()
        backward(model, True, model.no_sync())
        assert record.starts() == []


def test_a_wrapper_inside_a_checkpoint() -> None:
    run_ranks(inside_a_checkpoint, 2)


def compiled(backend: str) -> None:
    with process_group(timeout_s=60):
        for around in (False, True):
            network, record = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), Recorder()
            expected = average(alone(network, sum_of(0)))
            inner: Any = network if around else torch.compile(network, backend=backend)
            model: Any = HandwrittenDistributedDataParallel(inner, bucket_cap_mb=EACH_ALONE, all_reduce=record)
            if around:
                model = torch.compile(model, backend=backend)
            for _ in range(3):
                network.zero_grad()
                sum_of(0)(model)
                assert_same(grads(network), expected)
                assert len(record.starts()) == 4
            network.zero_grad()
            with model.no_sync():
                sum_of(0)(model)
            assert record.starts() == []
            assert_same(grads(network), alone(network, sum_of(0)))
            network.zero_grad()
            sum_of(1)(model)
            assert_same(grads(network), average(alone(network, sum_of(1))))
            assert len(record.starts()) == 4


def test_torch_compile_inside_and_around() -> None:
    run_ranks(compiled, 2, "aot_eager")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_torch_compile_with_inductor() -> None:
    run_ranks(compiled, 2, "inductor", timeout_s=280, fresh=True)  # it leaves threads that compile


# What travels, and where gradients live


def memory_of(bucket: Any) -> range:
    return range(bucket.buffer.data_ptr(), bucket.buffer.data_ptr() + bucket.buffer.nbytes)


def gradients_in_buckets() -> None:
    with process_group(timeout_s=60):
        for widths in WIDTHS:
            network = layers(*widths)
            model = HandwrittenDistributedDataParallel(network, bucket_cap_mb=EACH_ALONE)
            places = []
            for step in range(6):
                sum_of(0)(model)
                memory = [memory_of(bucket) for bucket in model.reducer.buckets]
                for parameter in network.parameters():
                    assert parameter.grad is not None
                    assert any(parameter.grad.data_ptr() in bucket for bucket in memory)
                places.append([cast(Tensor, parameter.grad).data_ptr() for parameter in network.parameters()])
                network.zero_grad(set_to_none=step % 2 == 0)
            assert places == [places[0]] * 6

        network = layers(3, 5, 2)
        model = HandwrittenDistributedDataParallel(network, gradient_as_bucket_view=False)
        sum_of(0)(model)
        memory = [memory_of(bucket) for bucket in model.reducer.buckets]
        for parameter in network.parameters():
            assert not any(cast(Tensor, parameter.grad).data_ptr() in bucket for bucket in memory)


def test_gradients_live_in_their_buckets_and_stay_there() -> None:
    run_ranks(gradients_in_buckets, 2)


class Fork(nn.Module):
    """Layers side by side, of different sizes, called in an order of each rank's own."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(scale, size, bias=False) for size in (1, 2, 3, 4)])

    def forward(self, x: Tensor) -> Any:
        order = [2, 0, 3, 1] if dist.get_rank() == 0 else [0, 1, 3, 2]
        outputs = {index: self.layers[index](x) for index in order}
        return [outputs[index] for index in range(4)]


def orders(scale: int) -> None:
    def backward(module: nn.Module) -> None:
        loss_of(module(inputs(width=scale))).backward()

    with process_group(timeout_s=60) as env:
        network, record = Fork(scale), Recorder()
        model = HandwrittenDistributedDataParallel(network, bucket_cap_mb=EACH_ALONE, all_reduce=record)
        for layer in network.layers:  # the wrapper's hook is on the same node, and comes first
            weight = cast(Tensor, layer.weight)
            event = ("ready", weight.numel())
            get_gradient_edge(weight).node.register_hook(lambda *_, event=event: record.events.append(event))
        expected = average(alone(network, backward))
        for step in range(3):
            network.zero_grad()
            backward(model)
            assert_same(grads(network), expected)
            ready = [size // scale for event, size in record.events if event == "ready"]
            kinds = "".join(event[0] for event, _ in record.events)  # s: an all-reduce starts; r: a gradient is ready
            # Backward finishes first what forward came to last.
            assert ready == ([2, 4, 1, 3] if env.rank == 0 else [3, 4, 2, 1])
            # In the first pass, the order of definition is a guess; afterwards, all ranks use rank 0's order.
            sent = [size // scale for size in all_ranks_have(record.starts())]
            assert sent == ([4, 3, 2, 1] if step == 0 else [2, 4, 1, 3])
            if step == 0:
                buckets = list(model.reducer.buckets)
            else:
                assert model.reducer.buckets == buckets  # and these stay
                assert kinds == ("srsrsrsr" if env.rank == 0 else "rrssrssr")
        with model.no_sync():
            backward(model)
        assert record.starts() == []


@pytest.mark.parametrize("scale", [3, 20_000])
def test_buckets_travel_while_backward_goes_on_in_the_same_order_on_all_ranks(scale: int) -> None:
    run_ranks(orders, 2, scale)


def wrapped_again() -> None:
    with process_group(timeout_s=60):
        network, first, second = layers(3, 5, 2), Recorder(), Recorder()
        model = HandwrittenDistributedDataParallel(network, all_reduce=first)
        sum_of(0)(model)
        assert len(first.starts()) == 1
        loss = loss_of(model(inputs()))  # a backward pass that is still expected
        reducer = weakref.ref(model.reducer)
        del model
        gc.collect()
        loss.backward()  # of which the output remembers
        first.starts()
        del loss
        gc.collect()
        assert reducer() is None
        network.zero_grad()

        model = HandwrittenDistributedDataParallel(network, all_reduce=second)
        sum_of(0)(model)
        assert first.starts() == []
        assert len(second.starts()) == 1
        assert_same(grads(network), average(alone(network, sum_of(0))))

        # A copy of the network has no wrapper.
        other = copy.deepcopy(network)
        sum_of(0)(other)
        assert second.starts() == []


def test_a_dropped_wrapper_leaves_nothing_behind() -> None:
    run_ranks(wrapped_again, 2)


class Own(nn.Module):
    """Parameters and buffers of which each rank has its own values."""

    own: Tensor
    ours: Tensor

    def __init__(self) -> None:
        super().__init__()
        value = 1.0 + dist.get_rank()
        self.mine, self.shared = nn.Parameter(torch.full((3,), value)), nn.Parameter(torch.full((3,), value))
        self.register_buffer("own", torch.full((3,), value))
        self.register_buffer("ours", torch.full((3,), value))

    def forward(self, x: Tensor) -> Any:
        for buffer in self.buffers():
            buffer += 1 + dist.get_rank()
        return x * self.shared * self.mine + self.own * self.ours


class Partly(nn.Sequential):
    _ddp_params_and_buffers_to_ignore = ("0.mine", "0.own")


def left_alone() -> list[float]:
    with process_group(timeout_s=60):
        results = []
        for engine in (DistributedDataParallel, HandwrittenDistributedDataParallel):
            network = Partly(Own())
            model = engine(network)
            for _ in range(3):
                model(inputs()).sum().backward()
            everything = [*network.state_dict().values(), *(p.grad for p in network.parameters())]
            results.append([cast(Tensor, tensor).tolist() for tensor in everything])
        theirs, ours = results
        assert ours == theirs
        assert cast(Own, network[0]).mine.tolist() == [1.0 + dist.get_rank()] * 3
        return cast("list[float]", ours[-1])


def test_what_is_to_be_ignored_is_left_alone() -> None:
    first, second = run_ranks(left_alone, 2)
    assert first == second  # the last parameter's gradient: the one that is not ignored


def in_a_subgroup() -> None:
    with process_group(timeout_s=60) as env:
        groups = [cast(dist.ProcessGroup, dist.new_group(ranks)) for ranks in ([1, 2], [0])]
        group = groups[env.rank == 0]
        torch.manual_seed(env.rank)
        network = Images()
        model = HandwrittenDistributedDataParallel(network, process_group=group, find_unused_parameters=True)
        x = torch.randn(3, 4, 6, 6)
        mine = [gradient.clone() for gradient in alone(network, lambda module: loss_of(module(x, 0)).backward())]
        for gradient in mine:
            dist.all_reduce(gradient, group=group)
        for _ in range(2):
            network.zero_grad()
            loss_of(model(x, 0)).backward()
            torch.testing.assert_close(grads(network), [gradient / group.size() for gradient in mine])
        sums = all_ranks_have_in(group, [parameter.sum().item() for parameter in network.parameters()])
        every: list[Any] = [None] * 3
        dist.all_gather_object(every, sums)
        assert every[0] != every[1] == every[2]


def all_ranks_have_in(group: dist.ProcessGroup, value: Any) -> Any:
    values = [None] * group.size()
    dist.all_gather_object(values, value, group)
    assert values == [value] * group.size()
    return value


def test_a_group_of_some_ranks() -> None:
    run_ranks(in_a_subgroup, 3)


# What is refused


def message(kind: type[Exception], user_error: Callable[[], Any]) -> str:
    """The error's message, the same on all ranks."""
    with pytest.raises(kind) as caught:
        user_error()
    return cast(str, all_ranks_have(str(caught.value)))


def wrap(network: nn.Module, **options: Any) -> HandwrittenDistributedDataParallel:
    return HandwrittenDistributedDataParallel(network, **options)


def refused_modules() -> None:
    with process_group(timeout_s=20) as env:
        same, other = layers(3, 2), layers(3, 4)

        assert message(RuntimeError, lambda: wrap(other if env.rank == 2 else same)) == (
            "the ranks' modules differ: 0.weight is float32 [2, 3] with strides [3, 1] on ranks 0 and 1, "
            "but float32 [4, 3] with strides [3, 1] on rank 2"
        )
        assert message(RuntimeError, lambda: wrap(layers(3, 2, 2) if env.rank == 0 else same)) == (
            "the ranks' modules differ: 1.weight is float32 [2, 2] with strides [2, 1] on rank 0, "
            "but missing on ranks 1 and 2"
        )
        assert message(RuntimeError, lambda: wrap(layers(3, 2).requires_grad_(env.rank == 0))) == (
            "the ranks' modules differ: 0.weight is float32 [2, 3] with strides [3, 1] on rank 0, "
            "but float32 [2, 3] with strides [3, 1], without gradient on ranks 1 and 2"
        )
        assert message(RuntimeError, lambda: wrap(layers(3, 2).double() if env.rank == 1 else same)).startswith(
            "the ranks' modules differ: 0.weight is float32 [2, 3] with strides [3, 1] on ranks 0 and 2, but float64"
        )
        columns = nn.Parameter(torch.zeros(3, 2).t() if env.rank else torch.zeros(2, 3))
        assert "but float32 [2, 3] with strides [1, 2] on ranks 1 and 2" in message(
            RuntimeError, lambda: wrap(nn.ParameterList([columns]))
        )
        buffered = layers(3, 2)
        if env.rank == 1:
            buffered.register_buffer("mask", torch.zeros(3))
        assert "mask is missing on ranks 0 and 2, but float32 [3] with strides [1], without gradient on rank 1" in (
            message(RuntimeError, lambda: wrap(buffered))
        )
        names = ("a", "b") if env.rank else ("b", "a")
        reordered = nn.ParameterDict([(name, nn.Parameter(torch.zeros(1))) for name in names])
        assert message(RuntimeError, lambda: wrap(reordered)) == (
            "the ranks' modules differ: rank 1 has rank 0's parameters in another order"
        )
        assert message(RuntimeError, lambda: wrap(same, bucket_cap_mb=1 + env.rank)) == (
            "the ranks' modules differ: bucket_cap_mb is 1 on rank 0, but 2 on rank 1 and 3 on rank 2"
        )
        for option in ("find_unused_parameters", "static_graph"):
            assert message(RuntimeError, lambda option=option: wrap(same, **{option: env.rank == 0})) == (  # type: ignore[misc]
                f"the ranks' modules differ: {option} is True on rank 0, but False on ranks 1 and 2"
            )
        assert "all_reduce is" in message(
            RuntimeError, lambda: wrap(same, all_reduce=Recorder() if env.rank else Backend())
        )

        assert message(RuntimeError, lambda: wrap(nn.Sequential(nn.ReLU()))) == (
            "Sequential has no parameter to train: there are no gradients to average"
        )
        assert "no parameter to train" in message(RuntimeError, lambda: wrap(layers(3, 2).requires_grad_(False)))
        assert message(ValueError, lambda: wrap(same, bucket_cap_mb=-1.5)) == "bucket_cap_mb=-1.5 must not be below 0"
        for gpus in ([0, 1], [0], [torch.device("cuda", 0)]):
            assert message(ValueError, lambda gpus=gpus: wrap(same, device_ids=gpus)) == (  # type: ignore[misc]
                f"device_ids={gpus} must name the module's GPU, but it is on cpu"
            )


def test_modules_that_differ_or_have_nothing_to_train() -> None:
    run_ranks(refused_modules, 3)


def refused_nesting_and_conversion() -> None:
    with process_group(timeout_s=20):
        network = layers(3, 2)
        expected = average(alone(network, sum_of(0)))
        outer = nn.Sequential(wrap(network, gradient_as_bucket_view=False))
        refusal = (
            "0 is wrapped already, and both wrappers would let .grad be a view into their buckets: wrap only one of them, or "
            "pass gradient_as_bucket_view=False to both"
        )
        drop_in = functools.partial(DropIn, gradient_as_bucket_view=True)
        assert message(ValueError, lambda: drop_in(outer)) == refusal
        assert message(ValueError, lambda: drop_in(nn.Sequential(wrap(layers(3, 2))))) == refusal
        sum_of(0)(wrap(outer, gradient_as_bucket_view=False))
        assert_same(grads(outer), expected)

        for find_unused in (False, True):
            network = layers(3, 2)
            model = wrap(network, find_unused_parameters=find_unused)
            network.double()
            assert message(RuntimeError, lambda model=model: loss_of(model(inputs().double())).backward()) == (  # type: ignore[misc]
                "2 parameters were converted after they were wrapped, to another dtype or device: 0.weight, 0.bias. Their "
                "gradients are not averaged any more: convert the module first, then wrap it"
            )


def test_nested_wrappers_and_parameters_that_change_their_dtype() -> None:
    run_ranks(refused_nesting_and_conversion, 2)


def refused_passes() -> None:
    with process_group(timeout_s=60):
        network = Heads()
        model = HandwrittenDistributedDataParallel(network, bucket_cap_mb=EACH_ALONE)
        expected = average(alone(network, lambda module: loss_of(module(inputs())).backward()))
        for _ in range(2):
            network.zero_grad()
            assert message(RuntimeError, lambda: loss_of(model(inputs())[1]).backward()) == (
                "backward gave no gradient to 2 of 6 parameters: heads.0.0.weight, heads.0.0.bias. This rank's loss does "
                "not depend on them: pass find_unused_parameters=True and no static_graph, or freeze them before wrapping"
            )
            network.zero_grad()
            loss_of(model(inputs())).backward()  # and training can go on
            assert_same(grads(network), expected)

        many = Chooses([0, 0])
        many.layers.extend([layers(3, 2) for _ in range(2)])
        assert message(RuntimeError, lambda: sum_of(0)(wrap(many))) == (
            "backward gave no gradient to 8 of 10 parameters: layers.1.0.weight, layers.1.0.bias, layers.2.0.weight, "
            "layers.2.0.bias, layers.3.0.weight, .... This rank's loss does not depend on them: pass "
            "find_unused_parameters=True and no static_graph, or freeze them before wrapping"
        )

        rows = nn.Sequential(nn.Embedding(7, 3, sparse=True))
        indices = torch.tensor([1, 2])
        assert "a gradient of [7, 3] is sparse: build its embedding with sparse=False" in (
            message(RuntimeError, lambda: wrap(rows)(indices).sum().backward())
        )


def test_passes_that_leave_a_parameter_out_or_have_sparse_gradients() -> None:
    run_ranks(refused_passes, 2)


def future_of(value: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


def no_future(state: Any, bucket: Any) -> Any:
    return bucket.buffer()


def no_tensor(state: Any, bucket: Any) -> Any:
    return future_of("done")


def wrong_size(state: Any, bucket: Any) -> Any:
    return future_of(bucket.buffer()[1:])


def raising(state: Any, bucket: Any) -> Any:
    raise ArithmeticError("of the hook's own")


def failing_future(state: Any, bucket: Any) -> Any:
    future = future_of(bucket.buffer())
    return future.then(lambda done: 1 / 0)


def refused_hooks() -> None:
    with process_group(timeout_s=60):
        mistakes: list[tuple[Any, type[Exception], str]] = [
            (no_future, TypeError, "the communication hook no_future must return a future of a tensor, not Tensor"),
            (no_tensor, TypeError, "the communication hook no_tensor must give a tensor of 8 elements, not str"),
            (
                wrong_size,
                TypeError,
                "the communication hook wrong_size must give a tensor of 8 elements, not 7 elements",
            ),
            (raising, ArithmeticError, "of the hook's own"),
            (failing_future, Exception, "division by zero"),
        ]
        for hook, kind, text in mistakes:
            model = wrap(layers(3, 2))
            model.register_comm_hook(None, hook)
            for _ in range(2):  # also when one pass has ended in it
                assert text in message(kind, lambda model=model: sum_of(0)(model))  # type: ignore[misc]

        model = wrap(layers(3, 2))
        assert message(TypeError, lambda: model.register_comm_hook(None, 3)) == (  # type: ignore[arg-type]
            "a communication hook is a function of (state, bucket), not int"
        )
        model.register_comm_hook(None, raising)
        assert message(RuntimeError, lambda: model.register_comm_hook(None, raising)) == (
            "there is a communication hook already: register one, before the first backward pass"
        )


def test_hooks_that_do_not_give_what_they_should() -> None:
    run_ranks(refused_hooks, 2)


def hooked(engine: Any) -> list[Any]:
    """What a hook sees, and the gradients that it makes."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Conv2d(4, 3, 2).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(75, 3))
    model = engine(network, bucket_cap_mb=1e-4)
    seen: list[Any] = []

    def hook(state: list[Any], bucket: Any) -> Any:
        pieces = [(piece.clone(), parameter.shape) for piece, parameter in zip(bucket.gradients(), bucket.parameters())]  # noqa: B905
        state.append((bucket.index(), bucket.is_last(), bucket.buffer().clone(), pieces))
        if len(state) % 2:
            bucket.set_buffer(bucket.buffer() * 3)
            state.append(bucket.buffer().clone())
            state.append([piece.clone() for piece in bucket.gradients()])
        return future_of(bucket.buffer() if len(state) % 3 else bucket.buffer() / 7)

    hook.__annotations__.clear()  # torch wants its own types there
    model.register_comm_hook(seen, hook)
    for step in range(3):
        network.zero_grad()
        model(torch.ones(2, 4, 6, 6)).square().sum().backward()
        seen.append(grads(network))
        if step == 0:  # torch's DDP fills the first pass's buckets from the other end
            seen.clear()
    return seen


def seen_by_hooks() -> None:
    with process_group(timeout_s=60):
        torch.testing.assert_close(hooked(HandwrittenDistributedDataParallel), hooked(DistributedDataParallel))


def test_a_hook_sees_what_torchs_shows_it() -> None:
    run_ranks(seen_by_hooks, 2)
