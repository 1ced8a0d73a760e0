"""A loader as fast as the decoder: images are decoded straight into the batch's own memory, which is reused.

``DataLoader`` needs processes, since most data sets are Python code that holds the GIL. A process must send its
batch: through shared memory that is new each time (a page fault per page), with a message through a pipe and a file
descriptor per tensor. Here a batch is decoded where it will be used:

- A JPEG decoder releases the GIL, so threads decode as fast as processes. If much of the work per image holds the GIL, as
  Pillow's conversions around an augmentation do, processes fill the same memory, which is shared with them once.
- All workers work on the next batch, so the first batch comes soon. Batches come in order: a late file delays the batches
  behind it, but they are filled meanwhile.
- Memory comes from a buffer pool and returns to it when the last tensor on it is gone (dataloading/loader/buffers.py).
- Pixels stay uint8 and in the decoder's order, a quarter of float's size; the device converts them.
- To a GPU, batches are copied from pinned memory while it computes (common/data/on_device.py).

dataloading/README.md has the measurements; ``python -m dataloading.ladder`` makes them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch

from common.data.datasets import Batch, BatchKey
from common.data.on_device import copied_ahead
from common.errors import UsageError
from common.gpu.devices import count_gpus
from common.machine import usable_cores
from dataloading.dataset.batches import LFWBatches
from dataloading.dataset.sampler import SampleKey, ShuffledBatches, ShuffledSampler, as_batch_key
from dataloading.loader.buffers import BufferPool, allocator
from dataloading.loader.worker_pool import PendingBatch, ProcessPool, ThreadPool, WorkerPool

POOLS = ("auto", "threads", "processes")


def choose_pool(works_per_image: bool) -> str:
    """The meaning of ``"auto"``: processes if images need more than decoding, else threads."""
    return "processes" if works_per_image else "threads"


class FastLoader:
    """Iterates over batches, as ``torch.utils.data.DataLoader`` does.

    :param dataset: the files, and the augmentation of a whole batch
    :param batch_size: images per batch, unless ``batch_sampler`` is given
    :param shuffle: by (seed of the data set, epoch); not together with a sampler. Each epoch has another order: without
        :meth:`set_epoch`, the epochs are counted
    :param sampler: yields indices, or :class:`SampleKey`
    :param batch_sampler: yields lists of these, or :class:`BatchKey`
    :param num_workers: threads or processes; 0 decodes each batch in the calling thread; None takes the usable cores
    :param pool: ``"threads"``, ``"processes"``, or ``"auto"``: processes if images are augmented or resized one by one,
        otherwise threads
    :param prefetch_batches: batches that are filled ahead of the current one
    :param persistent_workers: keep the worker pool between epochs, until :meth:`close` or the loader's end
    :param drop_last: leave out the last batch if it is not full
    :param device: the GPU on which the batches shall lie: they are copied there on a stream of their own, while it computes.
        None, or the CPU, leaves them where they are
    :param multiprocessing_context: the processes' start method
    :raises ValueError: for arguments that contradict each other
    :raises TypeError: if the data set is not an :class:`LFWBatches`
    :raises UsageError: for a GPU where there is none, and when its batches cannot be pinned
    """

    def __init__(
        self,
        dataset: LFWBatches,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        sampler: Iterable[int | SampleKey] | None = None,
        batch_sampler: Iterable[BatchKey | Sequence[int | SampleKey]] | None = None,
        num_workers: int | None = None,
        pool: str = "auto",
        prefetch_batches: int = 3,
        persistent_workers: bool = False,
        drop_last: bool = False,
        device: torch.device | str | None = None,
        multiprocessing_context: str | None = None,
    ) -> None:
        if batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last):
            raise ValueError("batch_sampler excludes batch_size, shuffle, sampler and drop_last")
        if sampler is not None and shuffle:
            raise ValueError("sampler excludes shuffle=True: the sampler decides the order")
        if not isinstance(dataset, LFWBatches):
            raise TypeError(
                f"the fast loader fills whole batches: give it LFWBatches(dataset), not {type(dataset).__name__}"
            )
        if prefetch_batches < 1:
            raise ValueError(f"prefetch_batches {prefetch_batches} is less than 1")
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size} is less than 1")
        if num_workers is not None and num_workers < 0:
            raise ValueError(f"num_workers {num_workers} is less than 0")
        if pool not in POOLS:
            raise ValueError(f"there is no worker pool {pool!r}: {', '.join(POOLS)}")
        self.device = _gpu(device)
        self._counts_epochs = batch_sampler is None and sampler is None
        if batch_sampler is None:
            if sampler is None:
                sampler = ShuffledSampler(len(dataset), seed=dataset.files.seed, shuffle=shuffle)
            batch_sampler = ShuffledBatches(sampler, batch_size, drop_last=drop_last)
        self.dataset, self.batch_sampler = dataset, batch_sampler
        self.num_workers = usable_cores() if num_workers is None else num_workers
        if pool == "auto":
            pool = choose_pool(dataset.works_per_image)
        self.pool, self.prefetch_batches = pool, prefetch_batches
        self._start_method, self._persistent = multiprocessing_context, persistent_workers
        self._epoch = 0
        in_processes = pool == "processes" and self.num_workers > 0
        self._buffers = BufferPool(dataset.image_shape, self.prefetch_batches + 1, allocator(in_processes, self.device))
        self._idle_pool: WorkerPool | None = None

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

        Workers that are not persistent end with the iterator, also after a ``break``, an exception, or Ctrl-C.

        :raises BadFile: instead of the batch with the file that cannot be read
        """
        epoch = self._epoch  # now: a later set_epoch is for the next iterator
        batches = iter(self.batch_sampler)
        keys = (as_batch_key(batch, epoch) for batch in batches)
        if self._counts_epochs:
            self.set_epoch(epoch + 1)
        made = self._prefetch(keys) if self.num_workers else self._load_here(keys)
        return made if self.device is None else copied_ahead(made, self.device)

    def close(self) -> None:
        """End persistent workers."""
        if self._idle_pool is not None:
            self._idle_pool.close()
            self._idle_pool = None

    def _load_here(self, keys: Iterator[BatchKey]) -> Iterator[Batch]:
        for key in keys:
            handle = self._buffers.take(len(key.samples))
            batch = self.dataset.assemble(key, handle.pixels, self.dataset.fill(handle.pixels, key))
            del handle
            yield batch
            del batch  # the user's references decide when the memory is reused

    def _prefetch(self, keys: Iterator[BatchKey]) -> Iterator[Batch]:
        # A second iterator beside this one starts its own pool.
        pool, self._idle_pool = self._idle_pool or self._start_pool(), None
        coming: deque[PendingBatch] = deque()
        finished = False
        try:
            while True:
                while len(coming) < self.prefetch_batches and (key := next(keys, None)) is not None:
                    coming.append(PendingBatch(key, self._buffers.take(len(key.samples))))
                    pool.submit(coming[-1])
                if not coming:
                    break
                pending = coming.popleft()
                pool.wait(pending)
                batch = self.dataset.assemble(pending.key, pending.handle.pixels, sorted(pending.skipped))
                del pending
                yield batch
                del batch  # the user's references decide when the memory is reused
            finished = True
        finally:
            # A pool that still fills abandoned batches is not reused.
            if self._persistent and finished and self._idle_pool is None:
                self._idle_pool = pool
            else:
                pool.close()

    def _start_pool(self) -> WorkerPool:
        if self.pool == "threads":
            pool: WorkerPool = ThreadPool(self.dataset, self.num_workers)
        else:
            pool = ProcessPool(self.dataset, self.num_workers, self._start_method)
        if self._persistent:
            weakref.finalize(self, pool.close)
        return pool


def _gpu(device: torch.device | str | None) -> torch.device | None:
    """The GPU; None for the CPU."""
    device = torch.device(device or "cpu")
    if device.type == "cpu":
        return None
    if device.type != "cuda" or (device.index or 0) >= count_gpus():
        raise UsageError(f"device {device} is not there: give one that is, or leave it out for batches on the CPU")
    return device
