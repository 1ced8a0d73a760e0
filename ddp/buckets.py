"""Buckets: the flat tensors in which gradients travel, many small ones in one message.

All gradients of one dtype and device lie in one piece of memory, in the order in which backward finishes them. A bucket is a
slice of it, and ``.grad`` a view into its bucket: nothing is copied out after the all-reduce. This follows
torch/csrc/distributed/c10d/reducer.cpp (``compute_bucket_assignment_by_size``) and Li et al., "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training" (2020), section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ddp.allreduce import Pending

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
        self.indices = indices
        self.parameters = parameters
        self.buffer = buffer
        self.missing = 0  # parameters whose gradients this backward pass has yet to finish
        self.pending: Pending | torch._C.Future[Any] | None = None
        self._as_view = as_view
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


class GradBucket:
    """A bucket as a communication hook sees it: the methods of ``torch.distributed.GradBucket``, which Python cannot make."""

    def __init__(self, bucket: Bucket, index: int, is_last: bool) -> None:
        self._bucket, self._index, self._is_last = bucket, index, is_last
        self._buffer = bucket.buffer

    def index(self) -> int:
        """The bucket's number, in the order of the all-reduces."""
        return self._index

    def buffer(self) -> Tensor:
        """``[n]``: the sum of this rank's gradients, not divided yet."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace what :meth:`buffer` gives; the hook's result counts all the same."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Views into the buffer, of the parameters' shapes."""
        return list(self._bucket.views)

    def parameters(self) -> list[Tensor]:
        """The parameters whose gradients they are."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Whether it is the last one of the backward pass."""
        return self._is_last


Hook = Callable[[Any, GradBucket], "torch.futures.Future[Tensor]"]


def run_hook(hook: Hook, state: Any, bucket: GradBucket) -> torch._C.Future[Any]:
    """:raises TypeError: if the hook returns anything but a future"""
    future = hook(state, bucket)
    if not isinstance(future, torch._C.Future):
        raise TypeError(f"{_name(hook)} must return a torch.futures.Future of a tensor, not {type(future).__name__}")
    return future


def take_result(hook: Hook, result: Any, buffer: Tensor) -> None:
    """Bring what a hook's future held into the bucket.

    :raises TypeError: for anything but a tensor; :raises ValueError: for one of another size
    """
    if isinstance(result, list) and len(result) == 1:  # as in the future of a collective
        (result,) = result
    if not isinstance(result, Tensor):
        raise TypeError(f"{_name(hook)}'s future must hold a tensor, not {type(result).__name__}")
    if result.numel() != buffer.numel():
        raise ValueError(f"{_name(hook)} gave {result.numel()} elements for a bucket of {buffer.numel()}")
    if result.data_ptr() != buffer.data_ptr():
        buffer.copy_(result.view(-1))


def _name(hook: Hook) -> str:
    return f"the communication hook {getattr(hook, '__name__', repr(hook))}"


def _shaped(piece: Tensor, parameter: Tensor) -> Tensor:
    """``piece`` with the parameter's shape, and its strides if it fills memory without gaps: optimizers walk both together."""
    parameter = parameter.detach()
    dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
    return piece.as_strided(parameter.shape, parameter.stride()) if dense else piece.view(parameter.shape)
