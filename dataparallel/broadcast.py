"""Copies of tensors on every device, for replicate. In backward, their gradients are summed on the first device.

After torch/nn/parallel/_functions.py and comm.py.
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
ALIGNMENT = 64  # elements: kernels read whole vectors, and are slower where a tensor is not aligned to them


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
                    _add(sums, own, ctx.devices[0])
        return (None, None, *sums)


def _add(sums: list[Tensor | None], gradients: Sequence[Tensor | None], device: torch.device) -> None:
    """Add one replica's gradients to the sums, which are on ``device``."""
    used = [(index, gradient) for index, gradient in enumerate(gradients) if gradient is not None]
    indices, arrived = [index for index, _ in used], [gradient for _, gradient in used]
    if arrived and arrived[0].device != device:
        arrived = send(arrived, device)
    before = [sums[index] for index in indices]
    both = [(total, gradient) for total, gradient in zip(before, arrived, strict=True) if total is not None]
    added = iter(torch._foreach_add([total for total, _ in both], [gradient for _, gradient in both]) if both else [])
    for index, total, gradient in zip(indices, before, arrived, strict=True):
        sums[index] = gradient if total is None else next(added)


def send(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of tensors on a device, of the same strides: one transfer for each dtype instead of one for each tensor."""
    copies = [tensor if _is_packable(tensor) else tensor.to(device, copy=True) for tensor in tensors]
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if _is_packable(tensor):
            by_dtype.setdefault(tensor.dtype, []).append(index)
    for indices in by_dtype.values():
        chosen = [tensors[index] for index in indices]
        packed = chosen[0].new_empty(sum(map(_span, chosen)))
        torch._foreach_copy_(_unpack(packed, chosen), chosen)
        for index, copy in zip(indices, _unpack(packed.to(device, non_blocking=True), chosen), strict=True):
            # .data has its own version counter, so changing one copy in place leaves the others valid.
            copies[index] = copy.data
    return copies


def _unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of one piece of memory, with the shapes and strides of these tensors."""
    offsets = itertools.accumulate(map(_span, like), initial=0)
    return [packed.as_strided(t.size(), t.stride(), offset) for t, offset in zip(like, offsets, strict=False)]


def _span(tensor: Tensor) -> int:
    """Elements of a packed tensor, with padding."""
    return -(-tensor.numel() // ALIGNMENT) * ALIGNMENT


def _is_packable(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps, and autograd need not see the copy. Sparse and expanded ones do not."""
    if tensor.layout != torch.strided or (tensor.requires_grad and torch.is_grad_enabled()):
        return False
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
