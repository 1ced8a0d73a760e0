"""Communication hooks: functions that average a bucket in another way, compressed for example. torch's own hooks work too.

model.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.by_hand.buckets import Bucket
from ddp.by_hand.reducer import Reducer

Hook = Callable[[Any, "GradBucket"], "torch.futures.Future[Tensor]"]


class GradBucket:
    """A bucket as a hook sees it, with the methods of ``torch.distributed.GradBucket``, which Python cannot make.

    ``buffer()`` is ``[n]``: this rank's gradients, not divided yet. ``gradients()`` are its parts in the shapes of the
    ``parameters()``, contiguous as torch's: of a channels-last weight, the right numbers in other places. That is enough to
    compress them. ``index()`` counts the buckets in the order of sending; ``is_last()`` is True for the last one.
    """

    def __init__(self, bucket: Bucket, index: int, is_last: bool) -> None:
        self.set_buffer(bucket.buffer)
        self.parameters: Callable[[], list[nn.Parameter]] = lambda: list(bucket.parameters.values())
        self._views = list(bucket.views.values())
        self.index, self.is_last = lambda: index, lambda: is_last

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the buffer that the hook sees; the hook's result is used in any case."""
        self.buffer: Callable[[], Tensor] = lambda: buffer

    def gradients(self) -> list[Tensor]:
        parts = self.buffer().split([view.numel() for view in self._views])
        return [part.view(view.shape) for part, view in zip(parts, self._views, strict=True)]


def register(reducer: Reducer, state: Any, hook: Hook) -> None:
    """Let ``hook(state, bucket)`` average each bucket, given as a :class:`GradBucket`, and return a future of the result.

    The future gives a tensor of as many elements as the bucket's. Before the first backward pass.

    :raises TypeError: if it cannot be called
    :raises RuntimeError: if there is a hook already
    :raises NotImplementedError: for torch's PowerSGD over gloo, unless all gradients are in one bucket. Its callbacks start
        all-reduces in gloo's threads, on each rank in another order, and hang. (With torch's DDP they hang, too.)
    """
    if not callable(hook):
        raise TypeError(
            f"a communication hook must be callable: a function of (state, bucket), not {type(hook).__name__}"
        )
    if reducer.comm_hook is not None:
        raise RuntimeError(
            "there is a communication hook already: register_comm_hook can only be called once, before the first backward"
        )
    several = len(reducer.buckets) > 1 or reducer.find_unused
    if type(state).__name__ == "PowerSGDState" and several and dist.get_backend(reducer.group) == "gloo":
        raise NotImplementedError(
            "PowerSGD over gloo hangs with several buckets, and with find_unused_parameters: pass a bucket_cap_mb that holds all "
            "gradients, or use NCCL"
        )
    reducer.comm_hook = functools.partial(HookedAverage, hook, state)


class HookedAverage:
    """The pending result of a hook for a bucket."""

    def __init__(self, hook: Hook, state: Any, bucket: Bucket, index: int, is_last: bool) -> None:
        self._buffer = bucket.buffer
        self._future = hook(state, GradBucket(bucket, index, is_last))
        if not isinstance(self._future, torch._C.Future):
            raise TypeError(f"a communication hook must return a future of a tensor, not {type(self._future).__name__}")

    def wait(self) -> None:
        """Return when the bucket's buffer holds the result."""
        result = self._future.wait()
        if isinstance(result, list):  # as in the future of a collective
            (result,) = result
        if result.data_ptr() != self._buffer.data_ptr():
            self._buffer.copy_(result.view(self._buffer.shape))  # of another number of elements: an error
