"""Memory for batches, reused as soon as no tensor refers to it.

Fresh memory is not free: the kernel makes each page at the first write, and for shared memory once more in the process that
reads it. ``python -m dataloading.ladder`` measures that cost. So a batch's memory comes from a pool. A tensor made by
``torch.from_numpy`` keeps its array alive, as do all views of the tensor. When the array is finalized, no view is left, and
the memory returns to the pool. While a user keeps a batch, its memory is never overwritten.

A GPU copies from page-locked memory while the host goes on. What starts such a copy keeps the batch until it is over
(common/data/on_device.py), so the same rule holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.data.loaders import require_shared_memory, shared_memory_is_full
from common.data.pinned import pin_shared, pinned_memory
from common.errors import UsageError
from dataloading.dataset.decoders import Pixels

Allocate = Callable[[tuple[int, ...]], Any]


class BufferPool:
    """Memory for batches: uint8 ``[images, height, width, 3]``.

    :param image_shape: height, width, channels
    :param keep: number of unused buffers to keep
    :param allocate: makes memory of a shape that ``numpy.asarray`` takes without a copy
    """

    def __init__(self, image_shape: tuple[int, int, int], keep: int, allocate: Allocate) -> None:
        self._image_shape, self._keep, self._allocate = image_shape, keep, allocate
        self._free: list[tuple[int, Any]] = []
        self._made = 0

    def take(self, images: int) -> BufferHandle:
        """Memory for this many images, with arbitrary content."""
        fitting = next((i for i, (_, memory) in enumerate(self._free) if len(memory) >= images), None)
        if fitting is None:
            del self._free[:1]  # a buffer that is too small gives way to one that may fit the next time
            number, memory = self._made, self._allocate((images, *self._image_shape))
            self._made += 1
        else:
            number, memory = self._free.pop(fitting)
        pixels = np.asarray(memory)[:images]
        weakref.finalize(pixels, self._give_back, number, memory).atexit = False
        return BufferHandle(number, memory, pixels)

    def _give_back(self, number: int, memory: Any) -> None:
        if len(self._free) < self._keep:
            self._free.append((number, memory))


class BufferHandle:
    """A buffer that is in use for as long as ``pixels`` lives.

    :param number: identifies the buffer each time it is reused
    :param memory: the result of the pool's ``allocate``, at least as large as the batch
    :param pixels: uint8 ``[images, height, width, 3]``, a view of the memory
    """

    def __init__(self, number: int, memory: Any, pixels: Pixels) -> None:
        self.number, self.memory, self.pixels = number, memory, pixels


def allocator(in_processes: bool, device: torch.device | None) -> Allocate:
    """What makes a buffer.

    :param in_processes: whether other processes fill it
    :param device: the GPU that reads it, from page-locked memory; None if none does
    """
    if device is None:
        return shared if in_processes else private

    def shared_and_locked(shape: tuple[int, ...]) -> Tensor:
        memory = shared(shape)
        pin_shared(memory, device, "load with --workers 0, or with threads")
        return memory

    return shared_and_locked if in_processes else pinned_memory


def private(shape: tuple[int, ...]) -> Pixels:
    """Memory of this process."""
    return np.empty(shape, np.uint8)


def shared(shape: tuple[int, ...]) -> Tensor:
    """Memory that other processes can map: a file in ``/dev/shm`` without a name, so that no process can leave it behind.

    :raises UsageError: when shared memory is full
    """
    # The file is sparse: without this check, the first write to a missing page would kill the process (SIGBUS).
    needed = int(np.prod(shape))
    require_shared_memory(needed)
    try:
        memory: Tensor = torch.empty(shape, dtype=torch.uint8)
        memory.untyped_storage()._share_fd_cpu_()  # like share_memory_(), but always by file descriptor, never by name
        return memory
    except RuntimeError as error:
        raise UsageError(f"{shared_memory_is_full(needed, None)} ({str(error).splitlines()[0]})") from error
