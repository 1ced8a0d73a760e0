"""Buffers that a function of the user synchronizes, before or after each forward pass, instead of a broadcast from rank 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel.distributed import _BufferCommHookLocation as BufferHookLocation

from ddp.by_hand.drop_in.join import JoinableDDP
from ddp.by_hand.replicas import replicated

BufferHook = Callable[[Any, dict[str, Tensor]], "list[torch.futures.Future[Any]] | None"]


class BufferHookedDDP(JoinableDDP):
    """The lesson with ``join``, and with a hook for the buffers."""

    _buffer_hook: tuple[BufferHook, Any, BufferHookLocation] | None = None
    _buffers_follow = False  # whether the hook runs after the running forward pass

    def _register_buffer_comm_hook(
        self, state: Any, hook: BufferHook, comm_hook_location: BufferHookLocation = BufferHookLocation.POST_FORWARD
    ) -> None:
        """Let ``hook(state, buffers by name)`` synchronize the buffers. The futures that it may return are awaited by the end
        of the next backward pass.

        :raises TypeError: if it cannot be called
        """
        if not callable(hook):
            raise TypeError(f"a buffer hook is a function of (state, buffers), not {type(hook).__name__}")
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
