"""`static_graph=True`

torch averages nothing during the first backward pass. A node at the module's output, `_DDPSink`, asks autograd to average all
gradients when that pass is over. If the node is not where backward comes along, or comes along at the wrong time, nothing is
averaged, in this step and all that follow.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.conformance.differences.program import TwoLayers, grad, hang_for_two_seconds, inputs, linear


def copied_wrapper(DDP: Any) -> Iterator[str]:
    """A copy of a wrapper

    After one step, `copy.deepcopy` (or `torch.save` and `torch.load`) of the wrapper gives one that never averages. Why:
    `__setstate__` makes a new reducer, which waits for the first backward pass to average it as a whole, but
    `_static_graph_delay_allreduce_enqueued` is copied as True: `_DDPSink` is not put in.

    With torch's: copy the module, and wrap the copy.
    """
    model = DDP(linear(), static_graph=True)
    model(inputs()).backward()
    yield f"the original: {grad(model.module.weight)}"
    copied = copy.deepcopy(model)
    copied.zero_grad()
    copied(inputs()).backward()
    yield f"its copy: {grad(copied.module.weight)}"


def gradient_penalty(DDP: Any) -> Iterator[str]:
    """`torch.autograd.grad` before the first backward pass

    A gradient penalty differentiates the output with respect to the input, then the loss with respect to the weights. The
    gradient of the loss is 1 + 2 on rank 0 and 3 + 2 on rank 1, 4 on average. torch averages nothing, in this step and all that
    follow. Why: the first backward pass that `_DDPSink` sees is the one for the input. It averages then, when there is nothing,
    and never again (`_static_graph_delay_allreduce_enqueued`).

    With torch's: `static_graph=False`.
    """
    network = linear()
    model = DDP(network, static_graph=True)
    for step in range(2):
        network.zero_grad()
        batch = inputs().requires_grad_()
        output = model(batch)
        (slope,) = torch.autograd.grad(output, batch, create_graph=True)
        (output + slope**2).sum().backward()
        yield f"step {step}: {grad(network.weight)}"


def hidden_output(DDP: Any) -> Iterator[str]:
    """A module that returns a dataclass

    Gradients are never averaged. Why: `_post_forward` looks for tensors by `tree_flatten`, which does not look into a dataclass
    that is not registered, so that `_DDPSink` is nowhere. (`_find_tensors`, in the same file, does look into it.) An object of
    another class, a loss that the module keeps in an attribute, and an output that is a parameter itself have the same effect.
    Issue #106690.

    With torch's: return tensors in tuples, lists or dicts, or register the class with
    `torch.utils._pytree.register_pytree_node`.
    """

    @dataclass
    class Output:
        y: Tensor

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Tensor) -> Output:
            return Output(self.layer(x))

    network = Model()
    model = DDP(network, static_graph=True)
    for step in range(2):
        network.zero_grad()
        model(inputs()).y.backward()
        yield f"step {step}: {grad(network.layer.weight)}"


def join_without_a_batch(DDP: Any) -> Iterator[str]:
    """`join` on a rank that has no batch at all

    The job hangs, or dies with an error of the transport. Why: in the first step `Reducer::delay_all_reduce` sends the map of
    used parameters, then the buckets. A rank that has joined sends the buckets alone (`_DDPJoinHook.main_hook` asks for
    `find_unused_parameters`).

    With torch's: give every rank at least one batch, or `static_graph=False`.
    """
    network = linear()
    model = DDP(network, static_graph=True)
    hang_for_two_seconds()
    with model.join():
        if dist.get_rank() == 0:
            model(inputs()).backward()
    yield f"gradient: {grad(network.weight)}"


def no_sync_first(DDP: Any) -> Iterator[str]:
    """Micro-steps under `no_sync` from the start

    Gradient accumulation fails in the first micro-step. Why: `_DDPSink` asks for the averages of a backward pass that
    `prepare_for_backward` was not called for. Issues #143580 and #187732.

    With torch's: one step without `no_sync` first, or `static_graph=False`.
    """
    network = linear()
    model = DDP(network, static_graph=True)
    with model.no_sync():
        model(inputs()).backward()
    model(inputs()).backward()
    yield f"the sum of two micro-steps: {grad(network.weight)}"


def unused_output(DDP: Any) -> Iterator[str]:
    """An output that the loss never uses

    The first step is right. In the second, the gradients are each rank's own, and the third forward pass raises. The graph did
    not change. Why: in the first step `_DDPSink` passes (no) gradients on to both outputs, so `b` counts as used; later it is
    gone, and `b` never becomes ready. Issue #97030.

    With torch's: return only what the loss uses.
    """

    class TwoOutputs(TwoLayers):
        def forward(self, x: Tensor, which: str = "ab") -> Any:
            return self.a(x), self.b(x)

    network = TwoOutputs()
    model = DDP(network, static_graph=True)
    for step in range(3):
        network.zero_grad()
        model(inputs())[0].backward()
        yield f"step {step}: {grad(network.a.weight)}"
