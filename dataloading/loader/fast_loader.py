"""A loader as fast as the decoder: images are decoded straight into the batch's own memory, which is reused.

``DataLoader`` needs processes, since most data sets are Python code that holds the GIL. A process must send its
batch: through shared memory that is new each time (a page fault per page), with a message through a pipe and a file
descriptor per tensor. Here a batch is decoded where it will be used:

- A JPEG decoder releases the GIL, so threads decode as fast as processes, start at no cost, and pass a batch on as a reference.
- All workers work on the next batch, so the first batch comes soon. Batches come in order: a late file delays the batches
  behind it, but they are filled meanwhile.
- Memory comes from a buffer pool and returns to it when the last tensor on it is gone (dataloading/loader/buffers.py).
- Pixels stay uint8 and in the decoder's order, a quarter of float's size; the device converts them.
- To a GPU, batches are copied from pinned memory while it computes (common/data/on_device.py).

dataloading/README.md has the measurements; ``python -m dataloading.ladder`` makes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from common.data.datasets import Batch, BatchKey
from common.data.on_device import copied_ahead
from common.errors import UsageError
from common.gpu.devices import count_gpus
from common.machine import usable_cores
from dataloading.dataset.batches import ImageBatches
from dataloading.dataset.decoders import Pixels
from dataloading.dataset.sampler import SampleKey, ShuffledBatches, ShuffledSampler, as_batch_key
from dataloading.loader.buffers import BufferPool

CHUNK = 8  # maximum number of images that a thread takes at a time


@dataclass(eq=False)
class PendingBatch:
    """A batch that is being filled.

    :param key: the epoch and the samples
    :param pixels: the memory to fill
    :param chunks: the threads' parts of it, in order
    """

    key: BatchKey
    pixels: Pixels
    chunks: list[Future[None]]

    def wait(self) -> None:
        """Wait until it is filled.

        :raises BadFile: that of the first sample that has one
        """
        for chunk in self.chunks:
            chunk.result()


class FastLoader:
    """Iterates over batches, as ``torch.utils.data.DataLoader`` does.

    :param dataset: the files, and the augmentation of a whole batch
    :param batch_size: images per batch, unless ``batch_sampler`` is given
    :param shuffle: by (seed of the data set, epoch); not together with a sampler. Each epoch has another order: without
        :meth:`set_epoch`, the epochs are counted
    :param sampler: yields indices, or :class:`SampleKey`
    :param batch_sampler: yields lists of these, or :class:`BatchKey`
    :param num_workers: threads; 0 decodes each batch in the calling thread; None takes the usable cores
    :param prefetch_batches: batches that are filled ahead of the current one
    :param drop_last: leave out the last batch if it is not full
    :param device: the GPU on which the batches shall lie: they are copied there on a stream of their own, while it computes.
        None, or the CPU, leaves them where they are
    :raises ValueError: for arguments that contradict each other
    :raises TypeError: if the data set is not an :class:`ImageBatches`
    :raises UsageError: for a GPU where there is none
    """

    def __init__(
        self,
        dataset: ImageBatches,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        sampler: Iterable[int | SampleKey] | None = None,
        batch_sampler: Iterable[BatchKey | Sequence[int | SampleKey]] | None = None,
        num_workers: int | None = None,
        prefetch_batches: int = 3,
        drop_last: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        if batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last):
            raise ValueError("batch_sampler excludes batch_size, shuffle, sampler and drop_last")
        if sampler is not None and shuffle:
            raise ValueError("sampler excludes shuffle=True: the sampler decides the order")
        if not isinstance(dataset, ImageBatches):
            raise TypeError(
                f"the fast loader fills whole batches: give it ImageBatches(files), not {type(dataset).__name__}"
            )
        if prefetch_batches < 1:
            raise ValueError(f"prefetch_batches {prefetch_batches} is less than 1")
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size} is less than 1")
        if num_workers is not None and num_workers < 0:
            raise ValueError(f"num_workers {num_workers} is less than 0")
        self.device = _gpu(device)
        self._counts_epochs = batch_sampler is None and sampler is None
        if batch_sampler is None:
            if sampler is None:
                sampler = ShuffledSampler(len(dataset), seed=dataset.files.seed, shuffle=shuffle)
            batch_sampler = ShuffledBatches(sampler, batch_size, drop_last=drop_last)
        self.dataset, self.batch_sampler = dataset, batch_sampler
        self.num_workers = usable_cores() if num_workers is None else num_workers
        self.prefetch_batches = prefetch_batches
        self._epoch = 0
        self._buffers = BufferPool(dataset.image_shape, prefetch_batches + 1, pinned=self.device is not None)

    def __len__(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch's order and augmentations. Call it before each epoch. (With the loader's own order, epochs that are
        not selected are counted from the one before.)"""
        self._epoch = epoch
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch]:
        """One epoch's batches, in order.

        The threads end with the iterator, also after a ``break``, an exception, or Ctrl-C.

        :raises BadFile: instead of the batch with the file that cannot be read
        """
        epoch = self._epoch  # now: a later set_epoch is for the next iterator
        batches = iter(self.batch_sampler)
        keys = (as_batch_key(batch, epoch) for batch in batches)
        if self._counts_epochs:
            self.set_epoch(epoch + 1)
        made = self._prefetch(keys) if self.num_workers else self._load_here(keys)
        return made if self.device is None else copied_ahead(made, self.device)

    def _load_here(self, keys: Iterator[BatchKey]) -> Iterator[Batch]:
        for key in keys:
            pixels = self._buffers.take(len(key.samples))
            self.dataset.fill(pixels, key)
            batch = self.dataset.assemble(key, pixels)
            del pixels
            yield batch
            del batch  # the user's references decide when the memory is reused

    def _prefetch(self, keys: Iterator[BatchKey]) -> Iterator[Batch]:
        threads = ThreadPoolExecutor(self.num_workers, "fast-loader")
        coming: deque[PendingBatch] = deque()
        try:
            while True:
                while len(coming) < self.prefetch_batches and (key := next(keys, None)) is not None:
                    coming.append(self._submit(threads, key))
                if not coming:
                    return
                pending = coming.popleft()
                pending.wait()
                batch = self.dataset.assemble(pending.key, pending.pixels)
                del pending
                yield batch
                del batch  # the user's references decide when the memory is reused
        finally:
            threads.shutdown(cancel_futures=True)

    def _submit(self, threads: ThreadPoolExecutor, key: BatchKey) -> PendingBatch:
        """Let the threads fill a batch in parts, so that all of them fill the first batch together."""
        images = len(key.samples)
        pixels = self._buffers.take(images)
        size = max(1, min(CHUNK, images // (4 * self.num_workers)))
        try:
            chunks = [
                threads.submit(self.dataset.fill, pixels, key, start, start + size) for start in range(0, images, size)
            ]
        except RuntimeError as error:
            raise UsageError(f"{self.num_workers} threads cannot be started: {error}") from error
        return PendingBatch(key, pixels, chunks)


def _gpu(device: torch.device | str | None) -> torch.device | None:
    """The GPU; None for the CPU."""
    device = torch.device(device or "cpu")
    if device.type == "cpu":
        return None
    if device.type != "cuda" or (device.index or 0) >= count_gpus():
        raise UsageError(f"device {device} is not there: give one that is, or leave it out for batches on the CPU")
    return device
