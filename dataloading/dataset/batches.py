"""Whole batches: the hook that ``DataLoader`` offers for them, and three ways to fill one.

A loader worker gets all of a batch's indices at once. If the data set has ``__getitems__``, it is called with them and
decides itself how the batch comes about; otherwise the worker calls ``__getitem__`` for one after the other.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from common.data.augmentation import NO_AUGMENTATION, Augmentation
from common.data.datasets import Batch, BatchKey
from dataloading.dataset.decoders import Pixels
from dataloading.dataset.lfw import LFWDataset, Skipped
from dataloading.dataset.sampler import SampleKey
from dataloading.dataset.storage import BadFile, Unskippable


def collate(items: list[Any]) -> Any:
    """torch's ``default_collate`` without the samples that were skipped; an empty list if all were.

    :raises BadFile: for images of several sizes
    """
    kept = [item for item in items if not isinstance(item, Skipped)]
    images = [item[0] if isinstance(item, tuple) else item for item in kept]
    shapes = sorted({tuple(image.shape) for image in images if isinstance(image, Tensor)})
    if len(shapes) > 1:
        raise Unskippable(f"images of several sizes make no batch: {shapes[0]} and {shapes[1]}; give --image-size")
    return default_collate(kept) if kept else []


class ThreadedFetch(Dataset[Any]):
    """Fetches the samples of a batch at the same time, by a pool of threads inside each loader worker.

    What arXiv 2211.04908 does for storage that answers late: while one file is waited for, the others are too. The
    order of the samples is kept, and of the errors the first in this order is raised.

    :param dataset: of samples, with ``__getitem__``
    :param threads: in the pool, which each process makes once, when it first needs it
    """

    def __init__(self, dataset: Dataset[Any], threads: int) -> None:
        self.dataset, self.threads = dataset, threads
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._pool_process = 0

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, key: int | SampleKey) -> Any:
        return self.dataset[key]

    def __getitems__(self, keys: Sequence[int | SampleKey]) -> list[Any]:
        futures = [self._threads().submit(self.dataset.__getitem__, key) for key in keys]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:  # after an error, those that have not begun
                future.cancel()

    def close(self) -> None:
        """End this process's pool."""
        if self._pool is not None and self._pool_process == os.getpid():
            self._pool.shutdown(cancel_futures=True)
        self._pool = None

    def _threads(self) -> concurrent.futures.ThreadPoolExecutor:
        if self._pool is None or self._pool_process != os.getpid():  # a pool's threads do not survive a fork
            self._pool = concurrent.futures.ThreadPoolExecutor(self.threads, thread_name_prefix="fetch")
            self._pool_process = os.getpid()
        return self._pool

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}


class LFWBatches(Dataset[Batch]):
    """An :class:`LFWDataset` that fills a batch's buffer in place: no tensor per image, no collate, no float.

    For the stock ``DataLoader``, with a batch sampler that yields :class:`BatchKey` and ``collate_fn=keep_batch``; and what
    the fast loader fills its buffers with.

    :param augmentation: of the whole batch, after that of each image; see :mod:`common.data.augmentation`
    """

    def __init__(self, files: LFWDataset, augmentation: Augmentation = NO_AUGMENTATION) -> None:
        self.files, self._augmentation = files, augmentation
        self.image_shape = files.image_shape()

    def __len__(self) -> int:
        return len(self.files)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width, as a batch has them."""
        height, width, channels = self.image_shape
        return channels, height, width

    @property
    def works_per_image(self) -> bool:
        """Whether more is done to an image than decoding it: work that holds the GIL for a good part."""
        return bool(self.files.augmentation) or self.files.image_size is not None

    @property
    def labels(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self.files.labels

    def __getitems__(self, key: BatchKey) -> Batch:
        """Fetch a batch, as the stock loader's worker does."""
        buffer = np.empty((len(key.samples), *self.image_shape), np.uint8)
        return self.assemble(key, buffer, self.fill(buffer, key))

    def fill(
        self,
        buffer: Pixels,
        key: BatchKey,
        start: int = 0,
        stop: int | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> list[int]:
        """Write the samples ``start`` to ``stop`` of a batch to their places in its buffer.

        :param buffer: uint8 ``[n, height, width, 3]``
        :param wanted: asked before each; from the first no on, nothing is read any more
        :returns: the places of those that were skipped
        :raises BadFile: for a file that cannot be read or decoded, unless such are skipped
        """
        samples = key.samples[start:stop]
        augmentation = self.files.augmentation
        draws = augmentation.draw(self.files.seed, key.epoch, samples) if augmentation else None
        skipped = []
        for i, sample in enumerate(samples.tolist()):
            if not wanted():
                break
            try:
                self.files.pixels_into(buffer[start + i], sample, None if draws is None else draws[i])
            except BadFile as error:
                self.files.skip_or_raise(sample, error)
                skipped.append(start + i)
        return skipped

    def assemble(self, key: BatchKey, buffer: Pixels, skipped: list[int], memory: Tensor | None = None) -> Batch:
        """The batch in a buffer that is filled: a view of it, unless samples were skipped.

        :param memory: the tensor that the buffer is a view of, if there is one. A pinned one must be handed out itself, since
            torch's allocator knows of copies that are under way by the tensor's storage
        :returns: images uint8 ``[n, 3, height, width]``, in channels-last memory as they were decoded: a copy into another
            order costs a third of what decoding does, and convolutions like this one
        """
        samples = key.samples
        if skipped:
            buffer, samples = np.delete(buffer, skipped, axis=0), np.delete(samples, skipped)
        if self._augmentation.shift or self._augmentation.flip:
            images = buffer.transpose(0, 3, 1, 2)
            buffer[:] = self._augmentation(images, self.files.seed, key.epoch, samples).transpose(0, 2, 3, 1)
        batch = torch.from_numpy(buffer) if memory is None or skipped else memory[: len(buffer)]
        return Batch(batch.permute(0, 3, 1, 2), torch.from_numpy(self.labels[samples]))
