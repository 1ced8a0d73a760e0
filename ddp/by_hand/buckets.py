"""Buckets: the flat tensors in which gradients travel, many small ones in one message.

All gradients of one dtype and device lie in one piece of memory, in the order in which backward finishes them. A bucket is a
slice of it, and ``.grad`` a view into its bucket: nothing is copied out after the all-reduce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

MIB = 2**20
DEFAULT_LIMITS = [1 * MIB, 25 * MIB]  # the first is small, so that communication begins soon after backward does

SMALL = 16_384  # elements, on average: below, to call for each gradient takes longer than to go over all of them twice

AnyTensor = TypeVar("AnyTensor", bound=Tensor)
Kind = tuple[torch.dtype, torch.device]
Hook = Callable[[Any, "GradBucket"], "torch.futures.Future[Tensor]"]


def assign_buckets(tensors: Iterable[AnyTensor], limits: Sequence[int]) -> list[list[AnyTensor]]:
    """Divide tensors into buckets of one dtype and device each, in order (``compute_bucket_assignment_by_size`` in C++).

    :param limits: bytes; a bucket is full when it has reached its limit: the first of a dtype and device the first limit,
        and so on, all further ones the last
    :returns: the buckets in the order in which they are full, and then those that never are
    """
    filling: dict[Kind, tuple[list[AnyTensor], int]] = {}
    full: Counter[Kind] = Counter()
    buckets = []
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        bucket, size = filling.pop(kind, ([], 0))
        filling[kind] = (bucket, size + tensor.nbytes)  # now the last: what remains at the end is in order
        bucket.append(tensor)
        if filling[kind][1] >= limits[min(full[kind], len(limits) - 1)]:
            buckets.append(filling.pop(kind)[0])
            full[kind] += 1
    return buckets + [bucket for bucket, _ in filling.values()]


class Bucket:
    """Parameters whose gradients are averaged by one all-reduce.

    :param parameters: by their numbers in the reducer
    :param buffer: ``[n]``, as many elements as the parameters have together
    :param as_view: whether the gradients live in ``buffer``; otherwise they are copied in, and out again
    """

    def __init__(self, parameters: dict[int, nn.Parameter], buffer: Tensor, as_view: bool) -> None:
        self.parameters, self.buffer, self._as_view = parameters, buffer, as_view
        self.uses = self.missing = 0  # gradients that become ready in a backward pass, and that are to come in this one
        self.waiting: set[int] = set()  # those that are not in the buffer yet
        self.small = buffer.numel() < SMALL * len(parameters)
        pieces = buffer.split([parameter.numel() for parameter in parameters.values()])
        self.views = {i: _shaped(piece, p) for (i, p), piece in zip(parameters.items(), pieces, strict=True)}

    def copy_in(self, index: int, divisor: float) -> None:
        """Bring a gradient, divided, into the buffer; zeros if there is none.

        A first gradient comes in a tensor of its own, and is divided as it is copied; then the view becomes ``.grad``, and
        autograd adds to it in place until ``zero_grad(set_to_none=True)`` drops it.
        """
        self.waiting.remove(index)
        parameter, view = self.parameters[index], self.views[index]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
        elif gradient.is_sparse:
            raise RuntimeError(f"a gradient of {list(view.shape)} is sparse: build its embedding with sparse=False")
        elif gradient is not view:
            torch.mul(gradient.detach(), 1 / divisor, out=view)  # detached: backward may run with create_graph
            if self._as_view:
                parameter.grad = view
        elif divisor != 1:
            view.div_(divisor)

    @torch.no_grad()
    def fill(self, divisor: float) -> None:
        """Bring those that are waiting: where all are new and small, at once."""
        gradients, views = [parameter.grad for parameter in self.parameters.values()], list(self.views.values())
        new = (g is not None and g is not view and not g.is_sparse for g, view in zip(gradients, views, strict=True))
        if self.small and all(new):
            torch._foreach_copy_(views, cast("list[Tensor]", gradients))
            self.buffer.mul_(1 / divisor)
            if self._as_view:
                for parameter, view in zip(self.parameters.values(), views, strict=True):
                    parameter.grad = view
            return
        for index in list(self.waiting):
            self.copy_in(index, divisor)

    @torch.no_grad()
    def finalize(self, receivers: Container[int]) -> None:
        """Make what the buffer now holds the gradients of those parameters whose indices are among ``receivers``."""
        for (index, parameter), view in zip(self.parameters.items(), self.views.values(), strict=True):
            if index in receivers and parameter.grad is not view:
                if parameter.grad is None or self._as_view:
                    parameter.grad = view if self._as_view else view.clone()
                else:
                    parameter.grad.copy_(view)


def _shaped(piece: Tensor, parameter: Tensor) -> Tensor:
    """``piece`` with the parameter's shape, and its strides if it fills memory without gaps: optimizers walk both together."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
    return piece.as_strided(parameter.shape, parameter.stride()) if dense else piece.view(parameter.shape)


class GradBucket:
    """A bucket as a hook sees it, with the methods of ``torch.distributed.GradBucket``, which Python cannot make.

    ``buffer()`` is ``[n]``, this rank's gradients, not divided yet, and ``gradients()`` are its pieces in the shapes of the
    ``parameters()``. ``index()`` counts the buckets in the order of sending, up to the one that ``is_last()``.
    """

    def __init__(self, bucket: Bucket, index: int, is_last: bool) -> None:
        self.set_buffer(bucket.buffer)
        self.parameters: Callable[[], list[nn.Parameter]] = lambda: list(bucket.parameters.values())
        self.index, self.is_last = lambda: index, lambda: is_last

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the buffer that the hook sees; its result counts all the same."""
        self.buffer: Callable[[], Tensor] = lambda: buffer

    def gradients(self) -> list[Tensor]:
        parameters = self.parameters()
        pieces = self.buffer().split([parameter.numel() for parameter in parameters])
        return [piece.view(parameter.shape) for piece, parameter in zip(pieces, parameters, strict=True)]


class HookedAverage:
    """What a hook has promised for a bucket. :raises TypeError: if it returned anything but a future"""

    def __init__(self, hook: Hook, state: Any, bucket: GradBucket) -> None:
        self._name = f"the communication hook {getattr(hook, '__name__', repr(hook))}"
        self._buffer = bucket.buffer()
        self._future = hook(state, bucket)
        if not isinstance(self._future, torch._C.Future):
            raise TypeError(f"{self._name} must return a future of a tensor, not {type(self._future).__name__}")

    def wait(self) -> None:
        """Until the bucket's buffer holds the result. :raises TypeError: for anything but a tensor of its size"""
        result = self._future.wait()
        if isinstance(result, list) and len(result) == 1:  # as in the future of a collective
            (result,) = result
        if not isinstance(result, Tensor) or result.numel() != self._buffer.numel():
            found = f"{result.numel()} elements" if isinstance(result, Tensor) else type(result).__name__
            raise TypeError(f"{self._name} must give a tensor of {self._buffer.numel()} elements, not {found}")
        if result.data_ptr() != self._buffer.data_ptr():
            self._buffer.copy_(result.view(-1))
