"""Functions of the user that communicate: hooks for buckets as torch's DDP takes them, and hooks for buffers.

A buffer hook synchronizes the buffers before or after each forward pass, instead of a broadcast from rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel.distributed import _BufferCommHookLocation as BufferHookLocation

from ddp.by_hand import comm_hook
from ddp.by_hand.drop_in.join import JoinableDDP
from ddp.by_hand.replicas import replicated

BufferHook = Callable[[Any, dict[str, Tensor]], "list[torch.futures.Future[Any]] | None"]


class HookedDDP(JoinableDDP):
    """The lesson with ``join``, and with torch's hooks."""

    bucket_type = comm_hook.GradBucket

    _buffer_hook: tuple[BufferHook, Any, BufferHookLocation] | None = None
    _hook_name = ""
    _buffers_follow = False  # whether the hook runs after the running forward pass

    def register_comm_hook(self, state: object, hook: comm_hook.Hook) -> None:
        """See torch's."""
        comm_hook.register(self.reducer, state, hook, self.bucket_type)
        self._hook_name = getattr(hook, "__qualname__", repr(hook))

    def _register_fused_optim(
        self,
        optim: type[torch.optim.Optimizer],
        *args: Any,
        optim_params: Iterable[Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Let an optimizer update each parameter when its gradient is averaged; see torch's."""
        from torch.distributed.algorithms._optimizer_overlap import optimizer_overlap

        self.bucket_type = comm_hook.StridedGradBucket
        optimizer_overlap._as_overlapped_optim(optim, optim_params, *args, **kwargs).register_ddp(self)

    def _register_buffer_comm_hook(
        self, state: Any, hook: BufferHook, comm_hook_location: BufferHookLocation = BufferHookLocation.POST_FORWARD
    ) -> None:
        """Let ``hook(state, buffers by name)`` synchronize the buffers. The futures that it may return are awaited by the end
        of the next backward pass.

        :raises TypeError: if it cannot be called
        """
        if not callable(hook):
            raise TypeError(
                f"a buffer hook must be callable: a function of (state, buffers), not {type(hook).__name__}"
            )
        self._buffer_hook = hook, state, comm_hook_location
        self._buffer_futures: list[torch.futures.Future[Any]] = []

    def synchronize_buffers(self, source: int = 0) -> None:
        if self._buffer_hook is None:
            super().synchronize_buffers(source)
            return
        self._buffers_follow = self._buffer_hook[2] is BufferHookLocation.POST_FORWARD
        if not self._buffers_follow:
            self._run_buffer_hook()
        elif self._join_config.enable:
            raise NotImplementedError(
                "a rank that has joined has no forward pass after which a buffer hook could run: pass "
                "comm_hook_location=PRE_FORWARD"
            )

    def synchronize_buffers_after_forward(self) -> None:
        """Run the hook if it is to run after forward passes."""
        if self._buffers_follow:
            self._buffers_follow = False
            self._run_buffer_hook()

    def await_buffers(self) -> None:
        """Backward is over: wait for what the hook has started."""
        if self._buffer_hook is not None:
            torch.futures.wait_all(self._buffer_futures)
            self._buffer_futures.clear()

    @torch.no_grad()
    def _run_buffer_hook(self) -> None:
        assert self._buffer_hook is not None
        hook, state, _ = self._buffer_hook
        if buffers := replicated(self.module, parameters=False):
            with torch.autograd._unsafe_preserve_version_counter(tuple(buffers.values())):  # type: ignore[attr-defined]
                self._buffer_futures += hook(state, buffers) or []
