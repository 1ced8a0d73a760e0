"""Memory for batches, used again as soon as no tensor refers to it.

Fresh memory is not free: the kernel makes each of its pages when it is first written to, and for shared memory once more in
the process that reads it; ``python -m dataloading.ladder`` has a rung for what that costs. So a batch's memory comes from a
pool. A tensor made by ``torch.from_numpy`` keeps its array alive, as do all views of the tensor; when the array is
finalized, nobody can see the memory any more, and it goes back. A user who keeps a batch keeps its memory: it is never
overwritten.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import UsageError
from dataloading.dataset.decoders import Pixels
from dataloading.loader.failures import MORE_SHARED_MEMORY

Allocate = Callable[[tuple[int, ...]], Any]


class BufferPool:
    """Batches' memory: uint8 ``[images, height, width, 3]``.

    :param allocate: makes memory of a shape, as anything that ``numpy.asarray`` takes without a copy
    :param keep: so many unused buffers are kept
    """

    def __init__(self, image_shape: tuple[int, int, int], keep: int, allocate: Allocate) -> None:
        self._image_shape, self._keep, self._allocate = image_shape, keep, allocate
        self._free: list[tuple[int, Any]] = []
        self._made = 0

    def take(self, images: int) -> Lease:
        """Memory for so many images, of whatever content."""
        fitting = next((i for i, (_, memory) in enumerate(self._free) if len(memory) >= images), None)
        if fitting is None:
            del self._free[:1]  # too small: it makes room for one that may fit the next time
            number, memory = self._made, self._allocate((images, *self._image_shape))
            self._made += 1
        else:
            number, memory = self._free.pop(fitting)
        pixels = np.asarray(memory)[:images]
        weakref.finalize(pixels, self._give_back, number, memory).atexit = False
        return Lease(number, memory, pixels)

    def _give_back(self, number: int, memory: Any) -> None:
        if len(self._free) < self._keep:
            self._free.append((number, memory))


class Lease:
    """Memory that is in use for as long as ``pixels`` is.

    :param number: the memory's own, the same each time it is used
    :param memory: what the pool's ``allocate`` made, at least as large as the batch
    :param pixels: uint8 ``[images, height, width, 3]``, a view of it
    """

    def __init__(self, number: int, memory: Any, pixels: Pixels) -> None:
        self.number, self.memory, self.pixels = number, memory, pixels


class PinnedMemory:
    """Stands in for a pool where batches go to a GPU: torch's allocator of page-locked memory is a pool already, and one
    that knows which of its blocks a copy to the device still reads from."""

    def __init__(self, image_shape: tuple[int, int, int]) -> None:
        self._image_shape = image_shape

    def take(self, images: int) -> Lease:
        memory = torch.empty((images, *self._image_shape), dtype=torch.uint8, pin_memory=True)
        return Lease(0, memory, memory.numpy())


def private(shape: tuple[int, ...]) -> Pixels:
    """Memory of this process."""
    return np.empty(shape, np.uint8)


def shared(shape: tuple[int, ...]) -> Tensor:
    """Memory that other processes can be given: a tensor's file in ``/dev/shm``, whose name is gone before this returns, so
    that nothing stays behind however the processes end.

    :raises UsageError: when shared memory is full
    """
    # A file there is sparse: where the space is missing, the first write to it would be the end of the process (SIGBUS).
    needed = int(np.prod(shape))
    require_shared_memory(needed)
    try:
        memory: Tensor = torch.empty(shape, dtype=torch.uint8)
        memory.untyped_storage()._share_fd_cpu_()  # as share_memory_() does, unless its strategy was changed to names
        return memory
    except RuntimeError as error:
        raise UsageError(f"{_full(needed, None)} ({str(error).splitlines()[0]})") from error


def require_shared_memory(needed: int) -> None:
    """Look before batches are put there, and torch leaves behind what found no room.

    :param needed: bytes
    :raises UsageError: when there are fewer
    """
    if os.path.isdir("/dev/shm"):
        state = os.statvfs("/dev/shm")
        if state.f_bavail * state.f_frsize < needed:
            raise UsageError(_full(needed, state.f_bavail * state.f_frsize))


def _full(needed: int, free: int | None) -> str:
    left = "" if free is None else f" and {free / 1e6:.1f} MB are left"
    return f"shared memory (/dev/shm) is full: its batches need {needed / 1e6:.1f} MB{left}; {MORE_SHARED_MEMORY}"
