"""Copies of tensors on every device, for replicate. In backward, their gradients are summed on the first device.

After torch/nn/parallel/_functions.py. (torch/nn/parallel/comm.py packs small tensors into messages of 10 MB before it sends them.)
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dataparallel.devices import current_streams, on_stream

# A context manager around a step of data parallelism: a range in a profile, or a stopwatch.
StepContext = Callable[[str], contextlib.AbstractContextManager[Any]]


class Broadcast(torch.autograd.Function):
    """Forward: tensors to every device. Backward: their gradients from every device, summed on the first.

    After torch/nn/parallel/_functions.py, where a gradient that no replica has becomes zeros; here it stays None.
    """

    @staticmethod
    def forward(ctx: Any, step: StepContext, devices: Sequence[torch.device], *tensors: Tensor) -> tuple[Tensor, ...]:
        """:returns: all tensors for the first device (themselves), then all for the second, and so on"""
        ctx.step, ctx.devices, ctx.streams = step, devices, current_streams(devices)
        ctx.set_materialize_grads(False)
        copies = [tensors, *(send(tensors, device) for device in devices[1:])]
        unchanged = [not needed for needed in ctx.needs_input_grad[2:]]
        ctx.mark_non_differentiable(*(t for own in copies for t in itertools.compress(own, unchanged)))
        return tuple(itertools.chain.from_iterable(copies))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """:param gradients: in the order of ``forward``'s result; None for tensors that a replica did not use"""
        count = len(gradients) // len(ctx.devices)
        (first,) = current_streams(ctx.devices[:1])  # autograd lets this one wait for all gradients, and no other
        with ctx.step("reduce"):
            sums = list(gradients[:count])
            for number, stream in enumerate(ctx.streams[1:], start=1):
                own = gradients[number * count : (number + 1) * count]
                # In the stream of the replica's passes, to which its gradients belong. The present one of its device is
                # another: streams are a thread's own, and this is autograd's thread for the first device.
                with on_stream(stream):
                    if stream is not None:
                        stream.wait_stream(first)
                    arrived = [gradient if gradient is None else gradient.to(ctx.devices[0]) for gradient in own]
                sums = [_add(total, gradient) for total, gradient in zip(sums, arrived, strict=True)]
        return (None, None, *sums)


def _add(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """The sum of the gradients that there are."""
    if total is None or gradient is None:
        return gradient if total is None else total
    return total + gradient


def send(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of tensors on a device, of the same strides."""
    return [tensor.to(device, non_blocking=True, copy=True) for tensor in tensors]
