"""A loader as fast as the decoder: images are decoded straight into the batch's own memory, which is used again.

The stock ``DataLoader`` needs processes, since most data sets are Python code that holds the GIL. A process's batch must
come over: into shared memory that is new each time (the kernel makes its pages, one fault each), with a message through a
pipe and a file descriptor per tensor. Here a batch is where it is wanted from the start:

- A JPEG decoder releases the GIL, so threads decode as well as processes do. Where a good part of the work on an image
  holds the GIL (Pillow's conversions around an augmentation do), processes fill the same memory, shared with them once.
- All work on the batch that is wanted next, so the first comes soon. Batches come in order: behind one with a late file the
  others wait, but they are being filled meanwhile.
- Memory is taken from a pool and goes back when the last tensor that refers to it is gone (dataloading/loader/buffers.py).
- Pixels stay uint8 and in the decoder's order, a quarter of float's size; the device converts them.

dataloading/README.md has the measurements; ``python -m dataloading.ladder`` makes them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch

from common.data.datasets import Batch, BatchKey
from common.errors import UsageError
from common.reporting.machine import usable_cores
from dataloading.dataset.batches import LFWBatches
from dataloading.dataset.sampler import SampleKey, ShuffledBatches, ShuffledSampler, as_batch_key
from dataloading.loader.buffers import BufferPool, Lease, PinnedMemory, private, shared
from dataloading.loader.worker_pool import Assembly, Crew, Processes, Threads

CREWS = ("auto", "threads", "processes")


def choose_crew(works_per_image: bool, pin_memory: bool) -> str:
    """What ``"auto"`` means: processes where more is done to an image than decoding it, if they can write to the memory."""
    return "processes" if works_per_image and not pin_memory else "threads"


class FastLoader:
    """Iterates over batches, as ``torch.utils.data.DataLoader`` does.

    :param dataset: the files, and what to do to a whole batch
    :param batch_size: images per batch, unless ``batch_sampler`` is given
    :param shuffle: by (seed of the data set, epoch); not together with a sampler
    :param sampler: yields indices, or :class:`SampleKey`
    :param batch_sampler: yields lists of these, or :class:`BatchKey`
    :param num_workers: threads or processes; 0 decodes in the thread that asks, when it asks; None takes the usable cores
    :param crew: ``"threads"``, ``"processes"``, or ``"auto"``: processes if images are augmented or resized one by
        one and the memory is not pinned, otherwise threads
    :param prefetch_batches: batches that are being filled, or wait, ahead of the one that was handed out
    :param persistent_workers: keep the crew between epochs, until :meth:`close` or the loader's end
    :param pin_memory: page-locked memory, for copies to a GPU that do not wait; for threads only
    :param multiprocessing_context: the processes' start method
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
        crew: str = "auto",
        prefetch_batches: int = 3,
        persistent_workers: bool = False,
        drop_last: bool = False,
        pin_memory: bool = False,
        multiprocessing_context: str | None = None,
    ) -> None:
        if batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last):
            raise ValueError("batch_sampler decides alone: give no batch_size, shuffle, sampler or drop_last with it")
        if sampler is not None and shuffle:
            raise ValueError("the sampler decides the order: shuffle=True contradicts it")
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
        if crew not in CREWS:
            raise ValueError(f"there is no crew {crew!r}: {', '.join(CREWS)}")
        if pin_memory and not torch.cuda.is_available():
            raise UsageError("pin_memory=True needs a GPU to copy to, and there is none here: leave it out")
        if crew == "processes" and pin_memory:
            raise ValueError("processes cannot write to this process's pinned memory: use threads")
        if batch_sampler is None:
            if sampler is None:
                sampler = ShuffledSampler(len(dataset), seed=dataset.files.seed, shuffle=shuffle)
            batch_sampler = ShuffledBatches(sampler, batch_size, drop_last=drop_last)
        self.dataset, self.batch_sampler = dataset, batch_sampler
        self.num_workers = usable_cores() if num_workers is None else num_workers
        if crew == "auto":
            crew = choose_crew(dataset.works_per_image, pin_memory)
        self.crew, self.prefetch_batches = crew, prefetch_batches
        self._start_method, self._persistent = multiprocessing_context, persistent_workers
        self._epoch = 0
        self._pool: BufferPool | PinnedMemory
        if pin_memory:
            self._pool = PinnedMemory(dataset.image_shape)
        else:
            in_processes = crew == "processes" and self.num_workers > 0
            self._pool = BufferPool(dataset.image_shape, self.prefetch_batches + 1, shared if in_processes else private)
        self._kept: Crew | None = None

    def __len__(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Another order and other augmentations; to be called before each epoch."""
        self._epoch = epoch
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch]:
        """One epoch's batches, in their order. Unless they are persistent, the workers end with the iterator, however it
        ends: at the last batch, by a ``break``, an exception, or Ctrl-C.

        :raises BadFile: in the place of the batch with the file that cannot be read
        """
        keys = (as_batch_key(batch, self._epoch) for batch in self.batch_sampler)
        return self._ahead(keys) if self.num_workers else self._at_once(keys)

    def close(self) -> None:
        """End persistent workers."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _at_once(self, keys: Iterator[BatchKey]) -> Iterator[Batch]:
        for key in keys:
            lease = self._pool.take(len(key.samples))
            batch = self._assemble(key, lease, self.dataset.fill(lease.pixels, key))
            del lease
            yield batch
            del batch  # from here on, the user's references decide when the memory is used again

    def _ahead(self, keys: Iterator[BatchKey]) -> Iterator[Batch]:
        crew, self._kept = self._kept or self._hire(), None  # a second iterator beside this one hires its own
        coming: deque[Assembly] = deque()
        finished = False
        try:
            while True:
                while len(coming) < self.prefetch_batches and (key := next(keys, None)) is not None:
                    coming.append(Assembly(key, self._pool.take(len(key.samples)), len(key.samples)))
                    crew.submit(coming[-1])
                if not coming:
                    break
                assembly = coming.popleft()
                crew.wait(assembly)
                assembly.raise_first()
                batch = self._assemble(assembly.key, assembly.lease, sorted(assembly.skipped))
                del assembly
                yield batch
                del batch  # from here on, the user's references decide when the memory is used again
            finished = True
        finally:
            # A crew in the middle of batches that nobody wants is not kept either.
            if self._persistent and finished and self._kept is None:
                self._kept = crew
            else:
                crew.close()

    def _assemble(self, key: BatchKey, lease: Lease, skipped: list[int]) -> Batch:
        pinned = isinstance(self._pool, PinnedMemory)
        return self.dataset.assemble(key, lease.pixels, skipped, lease.memory if pinned else None)

    def _hire(self) -> Crew:
        if self.crew == "threads":
            crew: Crew = Threads(self.dataset, self.num_workers)
        else:
            crew = Processes(self.dataset, self.num_workers, self._start_method)
        if self._persistent:
            weakref.finalize(self, crew.close)
        return crew
