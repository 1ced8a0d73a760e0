"""A copy of a job's state in memory, for a thread that writes it while training goes on.

On a GPU the copy is only queued: behind the step that is over, and before the kernels of the next one, which overwrite the
state. So training waits for nothing. The memory is pinned, or the host would wait for each tensor. It is made once: pinning
takes time, and new pages cost a fault per 4 KiB. A reader of the copy waits for one event, which was recorded behind the last tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from common.errors import UsageError


class StateCopy:
    """A copy of nested dicts, lists and tensors in the CPU's memory, which the next copy reuses.

    :param device: where the state is computed
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._leaves: list[Any] = []
        self._structure: Any = None
        self._complete: torch.cuda.Event | None = None

    def make_room(self, state: Any) -> None:
        """Provide the memory for a copy of this state. The copy before it must not be read any more.

        :raises UsageError: when there is too little
        """
        earlier, (leaves, self._structure) = self._leaves, tree_flatten(state)
        earlier += [None] * (len(leaves) - len(earlier))
        try:
            self._leaves = [self._memory_for(leaf, before) for leaf, before in zip(leaves, earlier, strict=False)]
        except RuntimeError as error:
            self._leaves = []
            raise UsageError(
                "--async-checkpoint keeps a copy of the checkpoint in the host's memory (pinned, on a GPU), and there is too "
                f"little: leave it out ({str(error).splitlines()[0]})"
            ) from error

    def take(self, state: Any) -> None:
        """Copy the tensors of the state for which :meth:`make_room` was called."""
        for memory, leaf in zip(self._leaves, tree_flatten(state)[0], strict=True):
            if isinstance(leaf, Tensor):
                memory.copy_(leaf.detach(), non_blocking=True)
        if self._device.type == "cuda":
            self._complete = torch.cuda.Event(blocking=True)  # the thread sleeps until then, and spins on no core
            self._complete.record(torch.cuda.current_stream(self._device))

    def read(self) -> Any:
        """The copy, once it is complete. From any thread."""
        if self._complete is not None:
            self._complete.synchronize()
        return tree_unflatten(self._leaves, self._structure)

    def _memory_for(self, leaf: Any, earlier: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if isinstance(earlier, Tensor) and (earlier.shape, earlier.dtype) == (leaf.shape, leaf.dtype):
            return earlier
        return torch.empty_like(leaf, device="cpu", pin_memory=self._device.type == "cuda")
