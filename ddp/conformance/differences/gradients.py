"""Gradients that are wrong, without a word"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp.conformance.differences.program import TwoLayers, grad, inputs, linear


def converted_after_wrapping(DDP: Any) -> Iterator[str]:
    """`.double()` after wrapping

    Nothing is averaged any more, in any step. `.half()` and `.bfloat16()` do the same. Why: the conversion gives each parameter
    a new node that accumulates its gradient, and the hooks that `Reducer::Reducer` has set stay at the old ones. Issue #104336,
    about a module that is moved to the CPU and back.

    With torch's: convert and move the module first, then wrap it.
    """
    network = linear()
    model = DDP(network).double()
    model(inputs().double()).backward()
    yield f"gradient: {grad(network.weight)}"


def delayed_and_not_awaited(DDP: Any) -> Iterator[str]:
    """`delay_all_reduce_named_params` does not wait

    The gradients of delayed parameters are not averages yet when backward is over; a slow rank 1 makes that visible here. An
    optimizer that steps now takes what is there. Why: `_delayed_all_reduce_hook` drops the handle of its all-reduce, `_ =
    dist.all_reduce(..., async_op=True)`.

    With torch's: leave the option out.
    """
    network, first = TwoLayers(), linear()
    model = DDP(
        network,
        delay_all_reduce_named_params=[("a.weight", network.a.weight)],
        param_to_hook_all_reduce=first.weight,
    )
    dist.barrier()
    hidden = first(inputs())
    hidden.register_hook(lambda _: time.sleep(0.5 * dist.get_rank()))
    model(hidden).backward()
    now = grad(network.a.weight)
    time.sleep(1)
    if dist.get_rank() == 0:
        yield f"when backward is over: {now}, a second later: {grad(network.a.weight)}"


def delayed_under_no_sync(DDP: Any) -> Iterator[str]:
    """`delay_all_reduce_named_params` under `no_sync`

    Delayed parameters (here `b`) are averaged under `no_sync` as well, and once more with what follows. Why:
    `_delayed_all_reduce_hook` does not look at `require_backward_grad_sync`.

    With torch's: no micro-steps with this option.
    """
    network = TwoLayers()
    model = DDP(
        network,
        delay_all_reduce_named_params=[("b.weight", network.b.weight)],
        param_to_hook_all_reduce=network.a.weight,
    )
    with model.no_sync():
        model(inputs()).backward()
    dist.barrier()
    time.sleep(0.3)  # torch's does not wait
    yield f"a: {grad(network.a.weight)}, b: {grad(network.b.weight)}"


def fused_and_channels_last(DDP: Any) -> Iterator[str]:
    """A fused optimizer and channels-last weights

    `_register_fused_optim` lets an optimizer update each parameter in the communication hook, from `bucket.gradients()`. Of a weight in
    channels-last format these have the right numbers in the wrong places: the bucket holds them in the weight's order of memory, and
    each piece is viewed by its sizes alone (`GradBucket::getGradients`). So the optimizer takes a wrong step, without a word.

    With torch's: call the optimizer after backward, with `parameter.grad`, which is right.
    """
    network = nn.Conv2d(2, 1, (1, 2), bias=False).to(memory_format=torch.channels_last)
    nn.init.zeros_(network.weight)
    model = DDP(network)
    model._register_fused_optim(torch.optim.SGD, lr=1.0)
    model(torch.arange(4.0).view(1, 2, 1, 2)).sum().backward()
    yield f"the gradient is 0, 1, 2, 3; after a step with a rate of 1, 0 became {network.weight.flatten().tolist()}"


def hook_result_too_large(DDP: Any) -> Iterator[str]:
    """A communication hook that returns more than the bucket

    The hook below gathers the buckets of all ranks, and forgets to average them. torch takes the first elements as the
    gradients: rank 0's on every rank, without a word. Why: `Reducer::populate_bucket_views_out` makes views of the result
    without looking at its size.

    With torch's: check in the hook that the result has as many elements as `bucket.buffer()`.
    """

    def gather(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        everyone = [torch.empty_like(bucket.buffer()) for _ in range(2)]
        work = dist.all_gather(everyone, bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda _: torch.cat(everyone))

    network = linear()
    model = DDP(network)
    model.register_comm_hook(None, lambda _, bucket: gather(bucket))
    model(inputs()).backward()
    yield f"gradient: {grad(network.weight)}"


def joined_rank_remembers(DDP: Any) -> Iterator[str]:
    """`find_unused_parameters` with `join`: a gradient of zeros for a parameter that no rank uses

    Rank 0 uses `b` in its second batch and not in its third, when rank 1 has joined. The gradient of `b` must then stay None, as
    it does without `join`; torch makes it zeros, so weight decay and momentum move a parameter that must rest. Why:
    `_match_unused_params_allreduce` sums the map of used parameters into the joined rank's own map, which it never clears and
    sends again.

    With torch's: no `weight_decay` and no momentum for parameters that may be unused.
    """
    network = TwoLayers()
    model = DDP(network, find_unused_parameters=True)
    with model.join():
        for which in ["ab", "ab", "a"][: 3 - 2 * dist.get_rank()]:  # rank 1 has one batch
            network.zero_grad()
            model(inputs(), which).backward()
    yield f"gradient of b: {grad(network.b.weight)}"


def replaced_parameters(DDP: Any) -> Iterator[str]:
    """`load_state_dict(..., assign=True)` after wrapping

    Nothing is averaged any more: the hooks sit on the parameters that were wrapped, which the module does not use now. Assigning
    `network.weight = nn.Parameter(...)` does the same.

    With torch's: load before wrapping, or without `assign`.
    """
    network = linear()
    model = DDP(network)
    network.load_state_dict({"weight": torch.ones(1, 1)}, assign=True)
    model(inputs()).backward()
    yield f"gradient: {grad(network.weight)}"


def skipped_backward(DDP: Any) -> Iterator[str]:
    """A forward pass without its backward pass, then `no_sync`

    The gradients of the next micro-step are averaged, though it is under `no_sync`. A backward pass is skipped, for example,
    where a loss is not finite, or where an evaluation forgets `torch.no_grad()`. Why: `_post_forward` tells the reducer that a
    backward pass will be averaged (`prepare_for_backward`), and a forward pass under `no_sync` does not take that back.

    With torch's: let a forward pass that no backward pass follows run under `torch.no_grad()`.
    """
    network = linear()
    model = DDP(network)
    model(inputs())
    with model.no_sync():
        model(inputs()).backward()
    yield f"under no_sync: {grad(network.weight)}"


def stale_divisor(DDP: Any) -> Iterator[str]:
    """`join(divide_by_initial_world_size=False)`, then `join(enable=False)`

    In the second block each rank divides by the number of ranks that it saw last in the first one: rank 0 by 1, rank 1 by 2. The
    sum is 1 / 1 + 3 / 2, not the average. Why: `Reducer::set_divide_factor` asks the handle that `_set_forward_pass_work_handle`
    was given in the first block, and nothing removes it.

    With torch's: the default, `divide_by_initial_world_size=True`, or one wrapper for each of the two.
    """
    network = linear()
    model = DDP(network)
    with model.join(divide_by_initial_world_size=False):
        for _ in range(2 - dist.get_rank()):  # rank 0 has two batches, rank 1 has one
            model(inputs()).backward()
    network.zero_grad()
    with model.join(enable=False):
        model(inputs()).backward()
    yield f"gradient: {grad(network.weight)}"


def two_backwards(DDP: Any) -> Iterator[str]:
    """Two forward passes, then two backward passes

    Only the first backward pass is averaged; the second adds each rank's own gradient. The same happens with
    `loss.backward(retain_graph=True)` and a second `loss.backward()`. Why: `_post_forward` tells the reducer that one backward
    pass follows, and `Reducer::finalize_backward` takes that back (`expect_autograd_hooks_ = false`). Issue #47260.

    With torch's: one backward pass of the sum of the losses.
    """
    network = linear()
    model = DDP(network)
    first, second = model(inputs()), model(inputs())
    first.backward()
    yield f"after the first: {grad(network.weight)}"
    second.backward()
    yield f"after both: {grad(network.weight)}"
