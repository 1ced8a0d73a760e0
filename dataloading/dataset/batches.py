"""Whole batches: the hook that ``DataLoader`` has for them, and three ways to fill one.

A loader worker gets all indices of a batch at once. If the data set has ``__getitems__``, the worker calls it with them all,
and the data set decides how to load the batch. Otherwise the worker calls ``__getitem__`` for one index after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from common.data.datasets import NO_AUGMENTATION, Augmentation, Batch, BatchKey
from dataloading.dataset.decoders import Pixels
from dataloading.dataset.image_files import ImageFiles
from dataloading.dataset.sampler import SampleKey, as_batch_key, random_epoch
from dataloading.dataset.storage import BadFile


def collate(items: list[Any]) -> Any:
    """torch's ``default_collate``, with advice in its error.

    :raises BadFile: for images of several sizes
    """
    shapes = sorted({tuple(image.shape) for image, _ in items if isinstance(image, Tensor)})
    if len(shapes) > 1:
        raise BadFile(
            f"images of several sizes make no batch: {shapes[0]} and {shapes[1]}; give image_size (--image-size)"
        )
    return default_collate(items)


FETCH_THREADS = 16  # of each worker: they hide most of the latency of storage that answers in 20 ms


class ThreadedFetch(Dataset[Any]):
    """Fetches the samples of a batch in parallel, with threads inside each loader worker.

    It follows arXiv 2211.04908 for storage with high latency: the waits for several files overlap. The order of the samples
    is kept. If several fail, the error of the first sample is raised. The threads end with the batch: to start them takes
    less than one file does, and a fork never finds any.

    :param dataset: of samples, with ``__getitem__``
    :param threads: at most so many at a time
    """

    def __init__(self, dataset: Dataset[Any], threads: int) -> None:
        self.dataset, self.threads = dataset, threads

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, key: int | SampleKey) -> Any:
        return self.dataset[key]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # while it is pickled and unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, keys: Sequence[int | SampleKey]) -> list[Any]:
        with ThreadPoolExecutor(self.threads, "fetch") as pool:
            return list(pool.map(self.dataset.__getitem__, keys))


class ImageBatches(Dataset[Any]):
    """An :class:`ImageFiles` that fills a batch's buffer in place: no tensor per image, no collate, no float.

    For the fast loader, and for ``DataLoader`` with a batch sampler that yields :class:`BatchKey` and
    ``collate_fn=keep_batch``.

    :param files: the images
    :param augmentation: of the whole batch, after that of each image; see :mod:`common.data.datasets`
    :raises ValueError: for files with a ``transform``, which needs an image object for each sample
    """

    def __init__(self, files: ImageFiles, augmentation: Augmentation = NO_AUGMENTATION) -> None:
        if files.transform is not None:
            raise ValueError(
                "ImageBatches makes no image object that the files' transform could be called with: leave transform out and use "
                "image_size and augmentation, or give the files themselves to torch's DataLoader"
            )
        self.files, self._augmentation = files, augmentation
        self.image_shape = files.image_shape()

    def __len__(self) -> int:
        return len(self.files)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a batch's images."""
        height, width, channels = self.image_shape
        return channels, height, width

    @property
    def labels(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self.files.labels

    def __getitems__(self, key: BatchKey | list[int | SampleKey]) -> Any:
        """Fetch a batch, as the worker of a ``DataLoader`` does.

        :returns: for a :class:`BatchKey` a :class:`Batch`; for a list of indices, as a ``DataLoader`` with a ``batch_size``
            asks for, a list of samples, augmented as in a random epoch
        """
        if not isinstance(key, BatchKey):
            augments = self.files.augmentation or self._augmentation
            batch = self.__getitems__(as_batch_key(key, random_epoch() if augments else 0))
            return list(zip(batch.images, batch.labels, strict=True))
        buffer = np.empty((len(key.samples), *self.image_shape), np.uint8)
        self.fill(buffer, key)
        return self.assemble(key, buffer)

    def fill(self, buffer: Pixels, key: BatchKey, start: int = 0, stop: int | None = None) -> None:
        """Write the samples ``start`` to ``stop`` of a batch to their positions in its buffer.

        :param buffer: uint8 ``[n, height, width, 3]``, of the whole batch
        :param key: the epoch and the samples of the whole batch
        :raises BadFile: for a file that cannot be read or decoded
        """
        samples = key.samples[start:stop]
        augmentation = self.files.augmentation
        draws = augmentation.draw(self.files.seed, key.epoch, samples) if augmentation else None
        for i, sample in enumerate(samples.tolist()):
            self.files.pixels_into(buffer[start + i], sample, None if draws is None else draws[i])

    def assemble(self, key: BatchKey, buffer: Pixels) -> Batch:
        """The batch of a filled buffer, as a view of it.

        :param key: the epoch and the samples
        :param buffer: uint8 ``[n, height, width, 3]``
        :returns: images uint8 ``[n, 3, height, width]`` in channels-last memory, as decoded: reordering costs a third of the
            decoding time, and convolutions are fast in this order. So ``flatten`` and ``reshape`` copy, and ``view`` refuses,
            as of every channels-last tensor; ``images.contiguous()`` has the other layout
        """
        if self._augmentation:
            images = buffer.transpose(0, 3, 1, 2)
            buffer[:] = self._augmentation(images, self.files.seed, key.epoch, key.samples).transpose(0, 2, 3, 1)
        return Batch(torch.from_numpy(buffer).permute(0, 3, 1, 2), torch.from_numpy(self.labels[key.samples]))


def __getattr__(name: str) -> NoReturn:
    if name == "LFWBatches":
        raise ImportError("LFWBatches is called ImageBatches now, since it takes any image files")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
