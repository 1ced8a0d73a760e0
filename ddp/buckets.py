"""Buckets: the flat tensors in which gradients travel, many small ones in one message.

All gradients of one dtype and device lie in one piece of memory, in the order in which backward finishes them. A bucket is a
slice of it, and ``.grad`` a view into its bucket: nothing is copied out after the all-reduce. This follows
torch/csrc/distributed/c10d/reducer.cpp (``compute_bucket_assignment_by_size``) and Li et al., "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training" (2020), section 4.2.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

MIB = 2**20
FIRST_BUCKET_BYTES = MIB  # small, so that communication begins soon after backward does
BUCKET_BYTES = 25 * MIB

AnyTensor = TypeVar("AnyTensor", bound=Tensor)


def assign_buckets(tensors: Iterable[AnyTensor], limits: Sequence[int]) -> list[list[AnyTensor]]:
    """Divide tensors into buckets of one dtype and device each, keeping their order.

    :param limits: bytes; a bucket is full when it has reached its limit: the first of a dtype and device the first limit,
        and so on, all further ones the last
    :returns: the buckets, in the order in which their last tensors come
    """
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[AnyTensor], int]] = {}
    full: dict[tuple[torch.dtype, torch.device], int] = {}
    buckets = []
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        bucket, size = filling.pop(kind, ([], 0))
        bucket.append(tensor)
        size += tensor.nbytes
        number = full.get(kind, 0)
        if size >= limits[min(number, len(limits) - 1)]:
            buckets.append(bucket)
            full[kind] = number + 1
        else:
            filling[kind] = (bucket, size)  # taken out and put in again, so the last: what remains is in order
    return buckets + [bucket for bucket, _ in filling.values()]


class Bucket:
    """Parameters whose gradients are averaged by one all-reduce.

    :param indices: of the parameters, as the reducer counts them
    :param buffer: ``[n]``, as many elements as the parameters have together
    :param as_view: whether the gradients live in ``buffer``; otherwise they are copied in, and out again
    """

    def __init__(self, indices: list[int], parameters: list[nn.Parameter], buffer: Tensor, as_view: bool) -> None:
        self.indices, self.parameters, self.buffer, self._as_view = indices, parameters, buffer, as_view
        self.missing = 0  # parameters whose gradients this backward pass has yet to finish
        pieces = buffer.split([parameter.numel() for parameter in parameters])
        self.views = [_shaped(piece, parameter) for piece, parameter in zip(pieces, parameters, strict=True)]

    def fill(self, divisor: float) -> None:
        """Bring the gradients, divided, into the buffer; zeros for those that do not exist.

        A first gradient comes in a tensor of its own, and is divided as it is copied; then the view becomes ``.grad``, and
        autograd adds to it in place until ``zero_grad(set_to_none=True)`` drops it.
        """
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient.is_sparse:
                raise RuntimeError(
                    f"a parameter of shape {list(parameter.shape)} has a sparse gradient, which has no place in a bucket: "
                    "build its embedding with sparse=False"
                )
            elif gradient is not view:
                torch.mul(gradient.detach(), 1 / divisor, out=view)
                if self._as_view:
                    parameter.grad = view
            elif divisor != 1:
                view.div_(divisor)

    def hand_out(self, receivers: Container[int]) -> None:
        """Make what the buffer now holds the gradients of those parameters whose indices are among ``receivers``."""
        for index, parameter, view in zip(self.indices, self.parameters, self.views, strict=True):
            if parameter.grad is view or index not in receivers:
                continue
            if self._as_view:
                parameter.grad = view
            elif parameter.grad is None:
                parameter.grad = view.clone()
            else:
                parameter.grad.copy_(view)


def _shaped(piece: Tensor, parameter: Tensor) -> Tensor:
    """``piece`` with the parameter's shape, and its strides if it fills memory without gaps: optimizers walk both together."""
    parameter = parameter.detach()
    dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
    return piece.as_strided(parameter.shape, parameter.stride()) if dense else piece.view(parameter.shape)
