"""Hooks: those of tensors and modules see what they would without the wrapper, and communication hooks see the buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp.conformance.check import Wrap, check
from ddp.conformance.expectations import expect, expect_averages, expect_refused, expect_same
from ddp.conformance.networks import layers
from ddp.conformance.steps import EACH_ALONE, alone, average, backward, gradients, inputs


@check
def hooks_of_parameters_run_before_the_average(wrap: Wrap) -> None:
    """A tensor hook changes this rank's gradient, here by another factor on each rank; what it returns is averaged."""
    network, factor = layers(3, 5, 2), 1.0 + dist.get_rank()
    expected = average([factor * gradient for gradient in alone(network)])
    model = wrap(network)
    for parameter in network.parameters():
        parameter.register_hook(lambda gradient: factor * gradient)
    backward(model)
    expect_same(gradients(network), expected)


def _clamp(parameter: Tensor) -> None:
    """A hook that changes .grad in place, differently on every rank."""
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01 * (1 + dist.get_rank()), 0.02)


def _expect_averages_of_clamped(wrap: Wrap, before_wrapping: bool) -> None:
    """Two steps with the hook, which is registered before or after wrapping."""
    network = layers(3, 5, 2)
    expected = average([gradient.clamp(-0.01 * (1 + dist.get_rank()), 0.02) for gradient in alone(network)])
    model = None if before_wrapping else wrap(network, bucket_cap_mb=EACH_ALONE)
    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(_clamp)
    if model is None:
        model = wrap(network, bucket_cap_mb=EACH_ALONE)
    for _ in range(2):
        model.zero_grad()
        backward(model)
        expect_same(gradients(network), expected)


@check
def accumulation_hooks_from_before_wrapping_run_before_the_average(wrap: Wrap) -> None:
    """A post-accumulate hook that clamps .grad in place clamps this rank's gradient, and the result is averaged."""
    _expect_averages_of_clamped(wrap, before_wrapping=True)


@check
def accumulation_hooks_from_after_wrapping_run_before_the_average(wrap: Wrap) -> None:
    """The same hook may be registered when the module is wrapped already: gradients leave after all such hooks."""
    _expect_averages_of_clamped(wrap, before_wrapping=False)


@check
def backward_hooks_of_modules_see_local_gradients(wrap: Wrap) -> None:
    """A full backward hook of a layer is given this rank's gradients of its output, as without the wrapper."""
    network, seen = layers(3, 5, 2), []

    def keep(_: nn.Module, __: Any, gradients: tuple[Tensor, ...]) -> None:
        seen.append(gradients[0].clone())

    network[0].register_full_backward_hook(keep)
    backward(network)
    network.zero_grad()
    backward(wrap(network))
    expect_same(seen[1:], seen[:1], "gradient in the hook")


@check
def forward_hooks_of_the_module_run_once_per_pass(wrap: Wrap) -> None:
    """The wrapper calls the module, not its forward: hooks for profiles and spectral norms hang on that."""
    network, calls = layers(3, 5, 2), []
    network.register_forward_pre_hook(lambda *_: calls.append("before"))
    network.register_forward_hook(lambda *_: calls.append("after"))
    model = wrap(network)
    model(inputs())
    expect(calls == ["before", "after"], f"one forward pass calls the hooks {calls}")


def _hook(function: Callable[[Any, Any], torch.futures.Future[Tensor]]) -> Any:
    """The function without its annotations, which torch would want to be its own types."""
    return lambda state, bucket: function(state, bucket)


def _done(tensor: Tensor) -> torch.futures.Future[Tensor]:
    """A future that has its result."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


def _with_hook(wrap: Wrap, state: object, hook: Callable[[Any, Any], Any]) -> Wrap:
    """The wrapper, with a communication hook."""

    def wrapped(module: nn.Module, **options: Any) -> Any:
        model = wrap(module, **options)
        model.register_comm_hook(state, hook)
        return model

    return wrapped


def _seen(wrap: Wrap, see: Callable[[Any], Any], **options: Any) -> tuple[nn.Module, list[list[Any]]]:
    """The results of ``see(bucket)`` in a communication hook: for each of three steps, the list over the buckets."""
    network = layers(3, 5, 2)
    steps: list[list[Any]] = []

    def hook(_: object, bucket: Any) -> torch.futures.Future[Tensor]:
        steps[-1].append(see(bucket))
        return _done(bucket.buffer())

    model = _with_hook(wrap, None, _hook(hook))(network, **options)
    for _ in range(3):
        model.zero_grad()
        steps.append([])
        backward(model)
    return network, steps


@check
def a_comm_hook_sees_every_gradient_once(wrap: Wrap) -> None:
    """In each step, the buckets that the hook is given have as many elements together as the gradients."""
    network, steps = _seen(wrap, lambda bucket: bucket.buffer().numel(), bucket_cap_mb=EACH_ALONE)
    total = sum(parameter.numel() for parameter in network.parameters())
    for step, sizes in enumerate(steps):
        expect(sum(sizes) == total, f"in step {step}, the hook is given {sizes} elements; there are {total}")


@check
def a_comm_hook_is_given_what_this_rank_computed(wrap: Wrap) -> None:
    """Without division: a hook that adds must divide by itself, and one that compresses sees the true sizes."""
    network = layers(3, 5, 2)
    own = alone(network)
    _, steps = _seen(wrap, lambda bucket: bucket.buffer().clone())
    expect_same([torch.cat(steps[0]).sum()], [torch.cat([one.flatten() for one in own]).sum()], "sum in the hook")


@check
def a_comm_hook_s_result_becomes_the_gradient(wrap: Wrap) -> None:
    """The hook decides: what its future holds is in .grad, and is neither divided nor averaged again."""
    network = layers(3, 5, 2)
    backward(_with_hook(wrap, None, lambda _, bucket: _done(torch.full_like(bucket.buffer(), 3.0)))(network))
    expect_same(gradients(network), [torch.full_like(p, 3.0) for p in network.parameters()])


@check
def a_comm_hook_s_future_may_be_late(wrap: Wrap) -> None:
    """A future that is computed from a collective's is awaited, and its last callback's result is taken."""
    network = layers(3, 5, 2)
    expected = [3 * gradient for gradient in average(alone(network))]

    def tripled(_: object, bucket: Any) -> torch.futures.Future[Tensor]:
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda one: one.value()[0] * 3 / dist.get_world_size())

    backward(_with_hook(wrap, None, _hook(tripled))(network, bucket_cap_mb=EACH_ALONE))
    expect_same(gradients(network), expected)


@check
def a_comm_hook_is_given_its_state(wrap: Wrap) -> None:
    """register_comm_hook(state, hook) hands the very object to each call: PowerSGD keeps its errors there."""
    state, seen = {"calls": 0}, []

    def hook(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        seen.append(state)
        return _done(bucket.buffer())

    backward(_with_hook(wrap, state, _hook(hook))(layers(3, 5, 2)))
    expect(seen and all(one is state for one in seen), f"the hook is given {seen} as its state")


@check
def torch_s_own_fp16_hook_works(wrap: Wrap) -> None:
    """default_hooks.fp16_compress_hook halves what is sent; the average is right to half precision."""
    network = layers(3, 5, 2)
    expected = average(alone(network))
    backward(_with_hook(wrap, None, default_hooks.fp16_compress_hook)(network))
    for gradient, correct in zip(gradients(network), expected, strict=True):
        error = float("inf") if gradient is None else (gradient - correct).abs().max().item()
        expect(error < 2e-3, f"a gradient is off by {error:.3g}, in units of up to {correct.abs().max():.3g}")


@check
def the_built_in_comm_hook_averages(wrap: Wrap) -> None:
    """The hook for a plain all-reduce gives what no hook gives."""
    hooked = _with_hook(wrap, dist.group.WORLD, default_hooks.allreduce_hook)
    expect_averages(hooked, layers(3, 5, 2), bucket_cap_mb=EACH_ALONE)


@check
def buckets_are_numbered_and_the_last_one_says_so(wrap: Wrap) -> None:
    """index() counts from 0 in every step, and is_last() is True for the last bucket alone."""
    _, steps = _seen(wrap, lambda bucket: (bucket.index(), bucket.is_last()), bucket_cap_mb=EACH_ALONE)
    for step, seen in enumerate(steps):
        expected = [(index, index == len(seen) - 1) for index in range(len(seen))]
        expect(sorted(seen) == expected, f"in step {step}, index() and is_last() are {seen}")
    expect(len(steps[-1]) >= 4, f"4 gradients are in {len(steps[-1])} buckets")


@check
def buckets_name_their_parameters(wrap: Wrap) -> None:
    """parameters() are the module's own, each in one bucket, with gradients() in their shapes."""
    network, steps = _seen(wrap, lambda bucket: (bucket.parameters(), [g.shape for g in bucket.gradients()]))
    for buckets in steps:
        parameters = [parameter for some, _ in buckets for parameter in some]
        shapes = [shape for _, some in buckets for shape in some]
        expect({*map(id, parameters)} == {*map(id, network.parameters())}, "parameters() are not the module's own")
        expect(len(parameters) == 4, f"4 parameters are {len(parameters)} times in a bucket")
        expected = [parameter.shape for parameter in parameters]
        expect(shapes == expected, f"gradients() have the shapes {shapes}, the parameters {expected}")


@check
def gradients_of_a_bucket_are_views_of_its_buffer(wrap: Wrap) -> None:
    """A hook that changes gradients() in place, clipping each for example, changes what it returns as buffer()."""

    def zero(bucket: Any) -> None:
        for gradient in bucket.gradients():
            gradient.zero_()

    network, _ = _seen(wrap, zero)
    expect_same(gradients(network), [torch.zeros_like(p) for p in network.parameters()])


@check
def set_buffer_replaces_the_buffer(wrap: Wrap) -> None:
    """After set_buffer(t), buffer() is t: a hook may hand the bucket on to another hook that way."""

    def replace(bucket: Any) -> Any:
        bucket.set_buffer(torch.full_like(bucket.buffer(), 5.0))
        return bucket.buffer().clone()

    _, steps = _seen(wrap, replace)
    buffer = torch.cat(steps[-1])
    expect_same([buffer], [torch.full_like(buffer, 5.0)], "buffer after set_buffer")


@check
def a_second_comm_hook_is_refused(wrap: Wrap) -> None:
    """Only one hook can average; a second would silently replace the first, or be ignored."""
    model = _with_hook(wrap, None, lambda _, bucket: _done(bucket.buffer()))(layers(3, 2))
    expect_refused(
        lambda: model.register_comm_hook(None, lambda _, bucket: _done(bucket.buffer())), "a second communication hook"
    )


@check
def a_comm_hook_that_cannot_be_called_is_refused(wrap: Wrap) -> None:
    """A name instead of a function is an error at once, not in the first backward pass."""
    model = wrap(layers(3, 2))
    expect_refused(lambda: model.register_comm_hook(None, "fp16"), "a text as communication hook")
