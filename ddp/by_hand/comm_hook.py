"""Communication hooks: functions that average a bucket in another way, compressed for example. torch's own hooks work too.

model.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ddp.by_hand.buckets import Bucket, shaped
from ddp.by_hand.reducer import Reducer

Hook = Callable[[Any, "GradBucket"], "torch.futures.Future[Tensor]"]


class GradBucket:
    """A bucket as a hook sees it, with the methods of ``torch.distributed.GradBucket``, which Python cannot make.

    ``buffer()`` is ``[n]``: this rank's gradients, not divided yet. ``gradients()`` are its pieces in the shapes of the
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
        return [piece.view(view.shape) for piece, view in self._pieces()]

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each piece of the buffer, with the bucket's view of it."""
        return zip(self.buffer().split([view.numel() for view in self._views]), self._views, strict=True)


class StridedGradBucket(GradBucket):
    """One whose ``gradients()`` have every number in its place, for a hook that updates the parameters with them."""

    def gradients(self) -> list[Tensor]:
        return [shaped(piece, view) for piece, view in self._pieces()]


class HookableDDP:
    """The part of a DDP wrapper that takes a communication hook."""

    reducer: Reducer
    bucket_type: type[GradBucket] = GradBucket

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Let ``hook(state, bucket)`` average each :class:`GradBucket` instead.

        :raises TypeError: if it cannot be called
        :raises RuntimeError: if there is a hook already
        """
        if not callable(hook):
            raise TypeError(f"a communication hook is a function of (state, bucket), not {type(hook).__name__}")
        if self.reducer.hook is not None:
            raise RuntimeError("there is a communication hook already: register one, before the first backward pass")
        self.reducer.hook = functools.partial(HookedAverage, hook, state, self.bucket_type)


class HookedAverage:
    """The pending result of a hook for a bucket.

    :raises TypeError: if the hook returned anything but a future
    """

    def __init__(
        self, hook: Hook, state: Any, bucket_type: type[GradBucket], bucket: Bucket, index: int, is_last: bool
    ) -> None:
        self._name = f"the communication hook {getattr(hook, '__name__', repr(hook))}"
        self._buffer = bucket.buffer
        self._future = hook(state, bucket_type(bucket, index, is_last))
        if not isinstance(self._future, torch._C.Future):
            raise TypeError(f"{self._name} must return a future of a tensor, not {type(self._future).__name__}")

    def wait(self) -> None:
        """Return when the bucket's buffer holds the result.

        :raises TypeError: if the result is not a tensor of its size
        """
        result = self._future.wait()
        if isinstance(result, list) and len(result) == 1:  # as in the future of a collective
            (result,) = result
        if not isinstance(result, Tensor) or result.numel() != self._buffer.numel():
            found = f"{result.numel()} elements" if isinstance(result, Tensor) else type(result).__name__
            raise TypeError(f"{self._name} must give a tensor of {self._buffer.numel()} elements, not {found}")
        if result.data_ptr() != self._buffer.data_ptr():
            self._buffer.copy_(result.view(-1))
