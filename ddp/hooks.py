"""Communication hooks: a function of the user's that averages the buckets in its own way, in fewer bits for example.

    model.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook)

torch's own (torch/distributed/algorithms/ddp_comm_hooks) run unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class GradBucket:
    """A bucket as a hook sees it: the methods of ``torch.distributed.GradBucket``, which Python cannot make.

    :param buffer: ``[n]``, this rank's gradients, not yet divided; :param gradients: views into it, of the parameters' shapes
    :param index: of the bucket, in the order of sending
    """

    def __init__(
        self, buffer: Tensor, gradients: list[Tensor], parameters: list[nn.Parameter], index: int, is_last: bool
    ) -> None:
        self._buffer = buffer
        self.buffer: Callable[[], Tensor] = lambda: self._buffer
        self.gradients: Callable[[], list[Tensor]] = lambda: gradients
        self.parameters: Callable[[], list[nn.Parameter]] = lambda: parameters
        self.index: Callable[[], int] = lambda: index
        self.is_last: Callable[[], bool] = lambda: is_last

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace what ``buffer()`` gives to the hook; its result counts all the same."""
        self._buffer = buffer


class HookedAverage:
    """What a hook promised for a bucket.

    :raises TypeError: if it returned anything but a future
    """

    def __init__(self, hook: Hook, state: Any, bucket: GradBucket) -> None:
        self._name = f"the communication hook {getattr(hook, '__name__', repr(hook))}"
        self._buffer = bucket.buffer()
        self._future = hook(state, bucket)
        if not isinstance(self._future, torch._C.Future):
            kind = type(self._future).__name__
            raise TypeError(f"{self._name} must return a torch.futures.Future of a tensor, not {kind}")

    def wait(self) -> None:
        """Until the bucket's buffer holds the result. :raises TypeError: for anything but a tensor of the buffer's size"""
        result = self._future.wait()
        if isinstance(result, list) and len(result) == 1:  # as in the future of a collective
            (result,) = result
        if not isinstance(result, Tensor) or result.numel() != self._buffer.numel():
            found = f"{result.numel()} elements" if isinstance(result, Tensor) else type(result).__name__
            raise TypeError(f"{self._name} must give a tensor of {self._buffer.numel()} elements, not {found}")
        if result.data_ptr() != self._buffer.data_ptr():
            self._buffer.copy_(result.view(-1))


Hook = Callable[[Any, GradBucket], "torch.futures.Future[Tensor]"]
