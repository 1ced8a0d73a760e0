"""Memory for batches, reused as soon as no tensor refers to it.

Fresh memory is not free: the kernel makes each page at the first write, and for shared memory once more in the process that
reads it. ``python -m dataloading.ladder`` measures that cost. So a batch's memory comes from a pool. A tensor made by
``torch.from_numpy`` keeps its array alive, as do all views of the tensor. When the array is finalized, no view is left, and
the memory returns to the pool. While a user keeps a batch, its memory is never overwritten.

A GPU copies from pinned memory while the host goes on. The code that starts such a copy keeps the batch until it is over
(common/data/on_device.py), so the same rule holds.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor

from dataloading.dataset.decoders import Pixels


class BufferPool:
    """Memory for batches: uint8 ``[images, height, width, 3]``.

    :param image_shape: height, width, channels
    :param keep: number of unused buffers to keep
    :param pinned: whether a GPU reads it
    """

    def __init__(self, image_shape: tuple[int, int, int], keep: int, pinned: bool) -> None:
        self._image_shape, self._keep, self._pinned = image_shape, keep, pinned
        self._free: list[Tensor] = []

    def take(self, images: int) -> Pixels:
        """Memory for this many images, with arbitrary content. It is in use for as long as the array or a view of it lives."""
        fitting = [place for place, memory in enumerate(self._free) if len(memory) >= images]
        if fitting:
            memory = self._free.pop(fitting[0])
        else:
            del self._free[:1]  # a buffer that is too small gives way to one that may fit the next time
            memory = torch.empty((images, *self._image_shape), dtype=torch.uint8, pin_memory=self._pinned)
        pixels = np.asarray(memory)[:images]
        weakref.finalize(pixels, self._give_back, memory).atexit = False
        return pixels

    def _give_back(self, memory: Tensor) -> None:
        if len(self._free) < self._keep:
            self._free.append(memory)
