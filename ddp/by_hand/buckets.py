"""Buckets: flat tensors in which many gradients are averaged by one all-reduce.

All gradients of one dtype and device lie in one block of memory, in the order in which backward finishes them. A bucket is a
range of it, and ``.grad`` a view into its bucket: nothing is copied back after the all-reduce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

MIB = 2**20
DEFAULT_LIMITS = [1 * MIB, 25 * MIB]  # bytes; the first bucket is small, so that communication begins early
# On the CPU, a bucket whose gradients have fewer elements on average is filled faster in one call than one by one.
SMALL = 16_384

AnyTensor = TypeVar("AnyTensor", bound=Tensor)
Kind = tuple[torch.dtype, torch.device]


def assign_buckets(tensors: Iterable[AnyTensor], limits: Sequence[int]) -> list[list[AnyTensor]]:
    """Divide tensors into buckets of one dtype and device each, in order. (``compute_bucket_assignment_by_size`` in reducer.cpp.)

    :param tensors: in the order in which they become ready
    :param limits: bytes at which a bucket is full: the first for the first bucket of a dtype and device, the last for all further ones
    :returns: the buckets in the order in which they become full, then those that are not full
    """
    filling: dict[Kind, tuple[list[AnyTensor], int]] = {}
    full: Counter[Kind] = Counter()
    buckets = []
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        bucket, size = filling.pop(kind, ([], 0))
        filling[kind] = (bucket, size + tensor.nbytes)  # last again: in the order of their latest tensors
        bucket.append(tensor)
        if filling[kind][1] >= limits[min(full[kind], len(limits) - 1)]:
            buckets.append(filling.pop(kind)[0])
            full[kind] += 1
    return buckets + [bucket for bucket, _ in filling.values()]


class Bucket:
    """Parameters whose gradients are averaged by one all-reduce.

    :param parameters: by their indices in the reducer
    :param buffer: ``[n]``, as many elements as the parameters have together
    :param as_view: whether the gradients are views into ``buffer``; otherwise they are copied in and back
    """

    def __init__(self, parameters: dict[int, nn.Parameter], buffer: Tensor, as_view: bool) -> None:
        self.parameters, self.buffer, self._as_view = parameters, buffer, as_view
        self.missing = 0  # gradients that will become ready in the running backward pass
        self.to_copy: set[int] = set()  # indices of gradients that are not in the buffer yet
        # Whether all are copied in one call, when the last is ready. On a GPU, each call would be a kernel to launch.
        self.copies_together = buffer.device.type != "cpu" or buffer.numel() < SMALL * len(parameters)
        parts = buffer.split([parameter.numel() for parameter in parameters.values()])
        self.views = {i: shaped(part, p) for (i, p), part in zip(parameters.items(), parts, strict=True)}
        self._places = {index: view.data_ptr() for index, view in self.views.items()}
        self._gradients = {index: view.detach() for index, view in self.views.items()}  # they become ``.grad``

    def copy_in(self, index: int, div_factor: float) -> None:
        """Copy one gradient, divided, into the buffer; zeros if there is none.

        Autograd makes a new tensor for a first gradient. It is divided as it is copied; then the view becomes ``.grad``, and
        autograd adds to it in place until ``zero_grad(set_to_none=True)`` drops it.

        :raises RuntimeError: for a sparse gradient
        """
        self.to_copy.remove(index)
        gradient, view = self.parameters[index].grad, self.views[index]
        if gradient is None:
            view.zero_()
        elif gradient.is_sparse:
            raise RuntimeError(f"a gradient of {list(view.shape)} is sparse: build its embedding with sparse=False")
        elif not self.contains_grad(index):
            torch.mul(gradient.detach(), 1 / div_factor, out=view)  # detached: backward may run with create_graph
            if self._as_view:
                self.set_grad_views([index])
        elif div_factor != 1:
            view.div_(div_factor)

    @torch.no_grad()
    def fill(self, div_factor: float) -> None:
        """Copy all gradients that are not in the buffer yet; all in one call if they are new."""
        gradients = [parameter.grad for parameter in self.parameters.values()]
        placed = zip(gradients, self._places.values(), strict=True)
        if self.copies_together and all(
            g is not None and not g.is_sparse and g.data_ptr() != place for g, place in placed
        ):
            torch._foreach_copy_(list(self.views.values()), cast("list[Tensor]", gradients))
            self.buffer.mul_(1 / div_factor)
            if self._as_view:
                self.set_grad_views(self.parameters)
            return
        for index in list(self.to_copy):
            self.copy_in(index, div_factor)

    @torch.no_grad()
    def set_grads(self, used: Container[int]) -> None:
        """Make the averages in the buffer the gradients of the parameters whose indices are in ``used``."""
        for index, parameter in self.parameters.items():
            if index in used and parameter.grad is not self._gradients[index]:
                if self._as_view:
                    self.set_grad_views([index])
                elif parameter.grad is None:
                    parameter.grad = self.views[index].clone()
                else:
                    parameter.grad.copy_(self.views[index])

    def contains_grad(self, index: int) -> bool:
        """Whether a gradient lies in this bucket. Its memory tells: ``.grad.data = ...`` moves a tensor to another place."""
        gradient = self.parameters[index].grad
        return gradient is not None and gradient.data_ptr() == self._places[index]

    def set_grad_views(self, indices: Iterable[int]) -> None:
        """Let ``.grad`` be the views into this bucket."""
        for index in indices:
            if self._gradients[index].data_ptr() != self._places[index]:  # ``.grad.data = ...`` moved it
                self._gradients[index] = self.views[index].detach()
            self.parameters[index].grad = self._gradients[index]

    def drop(self) -> None:
        """Forget the gradients that lie in this bucket."""
        for index in filter(self.contains_grad, self.parameters):
            self.parameters[index].grad = None


def shaped(part: Tensor, parameter: Tensor) -> Tensor:
    """``part``, 1-d, in the parameter's shape, and with its strides if it has no gaps in memory, so that optimizers are fast."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
    return part.as_strided(parameter.shape, parameter.stride()) if dense else part.view(parameter.shape)
