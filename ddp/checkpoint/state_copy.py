"""A copy of a job's state in memory, for a thread that writes it while training goes on.

On a GPU the copy is only queued: behind the step that is over, and before the kernels of the next one, which overwrite the
state. So training waits for nothing. The memory is page-locked, or the host would wait for each tensor. It is made once: locking
takes time, and new pages cost a fault per 4 KiB. Who reads the copy waits for one event, which was recorded behind the last tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.errors import UsageError


class StateCopy:
    """A copy of nested dicts, lists and tensors in the CPU's memory, which the next copy uses again.

    :param device: where the state is computed
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tree: Any = None
        self._complete: torch.cuda.Event | None = None

    def make_room(self, state: Any) -> None:
        """Provide the memory for a copy of this state. The copy before it must not be read any more.

        :raises UsageError: when there is too little
        """
        try:
            self._tree = self._memory_for(state, self._tree)
        except RuntimeError as error:
            self._tree = None
            raise UsageError(
                "--async-checkpoint keeps a copy of the checkpoint in the host's memory (page-locked, on a GPU), and there is too "
                f"little: leave it out ({str(error).splitlines()[0]})"
            ) from error

    def take(self, state: Any) -> None:
        """Copy the tensors of the state for which :meth:`make_room` was called."""
        _copy(self._tree, state)
        if self._device.type == "cuda":
            self._complete = torch.cuda.Event(blocking=True)  # the thread sleeps until then, and spins on no core
            self._complete.record(torch.cuda.current_stream(self._device))

    def read(self) -> Any:
        """The copy, once it is complete. From any thread."""
        if self._complete is not None:
            self._complete.synchronize()
        return self._tree

    def _memory_for(self, tree: Any, earlier: Any) -> Any:
        if isinstance(tree, Tensor):
            if isinstance(earlier, Tensor) and (earlier.shape, earlier.dtype) == (tree.shape, tree.dtype):
                return earlier
            return torch.empty_like(tree, device="cpu", pin_memory=self._device.type == "cuda")
        if isinstance(tree, dict):
            known = earlier if isinstance(earlier, dict) else {}
            return {key: self._memory_for(value, known.get(key)) for key, value in tree.items()}
        if isinstance(tree, list):
            same = isinstance(earlier, list) and len(earlier) == len(tree)
            return [self._memory_for(value, earlier[i] if same else None) for i, value in enumerate(tree)]
        return tree


def _copy(memory: Any, tree: Any) -> None:
    if isinstance(tree, Tensor):
        memory.copy_(tree.detach(), non_blocking=True)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            _copy(memory[key], value)
    elif isinstance(tree, list):
        for ours, value in zip(memory, tree, strict=True):
            _copy(ours, value)
