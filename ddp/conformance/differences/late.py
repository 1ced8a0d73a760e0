"""Said too late"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp.conformance.differences.program import TwoLayers, grad, hang_for_two_seconds, inputs, linear, shown


def error_in_backward(DDP: Any) -> Iterator[str]:
    """An error in the middle of backward

    A hook raises once, as one does where memory is short. All ranks catch it, and skip the step. torch then refuses every later
    step by an assertion of its own. Why: autograd does not call `Reducer::finalize_backward`, so `require_finalize_` stays True.
    An error in a communication hook has the same effect.

    With torch's: make a new wrapper.
    """

    def fail(*_: Any) -> None:
        raise MemoryError("too little memory")

    network = TwoLayers()
    model = DDP(network)
    hook = network.a.register_full_backward_hook(fail)
    try:
        model(inputs().requires_grad_()).backward()
    except MemoryError as error:
        yield shown(error)
    hook.remove()
    network.zero_grad()
    model(inputs()).backward()
    yield f"the next step: {grad(network.a.weight)}"


def evaluation_after_join(DDP: Any) -> Iterator[str]:
    """Rank 0 evaluates alone after `join`

    Without `join`, a forward pass under `no_grad` sends nothing if the module has no buffers. After a block of `join`, it still sends
    what tells ranks that have joined to take part, and so waits for the other ranks. Why: `Join.__exit__` leaves `_join_config.enable`
    at True.

    With torch's: evaluate `model.module`, or leave the state by an empty block, `with model.join(enable=False): pass`.
    """
    network = linear()
    model = DDP(network)
    with model.join():
        model(inputs()).backward()
    hang_for_two_seconds()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(inputs())
    dist.barrier()
    yield f"gradient: {grad(network.weight)}"


def repeated_backward(DDP: Any) -> Iterator[str]:
    """A backward pass that failed, and is called again

    `retain_graph=True` keeps the graph, so a backward pass that a hook ended can be repeated without a forward pass. torch counts on
    where it stopped: `b` was ready in the first pass, and becomes ready again. Why: only the next forward pass calls
    `Reducer::prepare_for_backward`, which resets the counts.

    With torch's: call the model again.
    """

    def fail(*_: Any) -> None:
        raise MemoryError("too little memory")

    network = TwoLayers()
    model = DDP(network)
    loss = model(inputs().requires_grad_())
    hook = network.a.weight.register_hook(fail)
    try:
        loss.backward(retain_graph=True)
    except MemoryError as error:
        yield shown(error)
    hook.remove()
    network.zero_grad()
    loss.backward()
    yield f"a: {grad(network.a.weight)}, b: {grad(network.b.weight)}"


def unused_parameter(DDP: Any) -> Iterator[str]:
    """A parameter without a gradient

    torch says nothing in the backward pass that gives `b` no gradient. Their bucket waits for `b`, so the gradient of `a` stays
    each rank's own; the optimizer steps, and the ranks' weights differ from then on. The next forward pass raises, and names no
    parameter. Why: `Reducer::ensure_prior_reduction_finished` is called before a forward pass (`_rebuild_buckets`), not after a
    backward pass.

    With torch's: call `model._check_reducer_finalized()` after each backward pass, which raises it in time.
    """
    network = TwoLayers()
    model = DDP(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for step in range(2):
        model(inputs(), "a").backward()
        optimizer.step()
        yield f"after step {step} the weight is {network.a.weight.item():.1f}"


def wrapper_in_a_wrapper(DDP: Any) -> Iterator[str]:
    """A wrapper within a wrapper, with `gradient_as_bucket_view`

    Both refuse it: torch in the first backward pass, and ours when it is wrapped. Why: as for two wrappers of one module.

    With torch's: wrap the outer module alone.
    """
    inner = nn.Sequential(DDP(linear(), gradient_as_bucket_view=True))
    model = DDP(inner, gradient_as_bucket_view=True)
    yield "it is wrapped"
    model(inputs()).backward()
