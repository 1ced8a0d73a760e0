"""The order of the samples: a shuffle that is a pure function of (seed, epoch).

A sampler for ``DataLoader`` yields one :class:`SampleKey` at a time, a batch sampler one :class:`BatchKey`. Each
key contains the epoch, since a worker's copy of the data set never sees a ``set_epoch``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from common.data.datasets import BatchKey
from common.randomness import derive_seed


class SampleKey(NamedTuple):
    """A sample with the augmentation of an epoch."""

    epoch: int
    sample: int


def random_epoch() -> int:
    """The epoch of a plain index, which tells none: by torch's generator, which differs in each worker and epoch of a ``DataLoader``."""
    return int(torch.randint(2**31, ()).item())


class ShuffledSampler:
    """Yields every sample once per epoch, for ``DataLoader(sampler=...)``.

    :param samples: number of samples in the data set
    :param seed: of the order
    :param shuffle: if False, the samples come in ascending order
    :param length: yield this many keys of the epoch instead, from one order after the other, for runs of a fixed length
    """

    def __init__(self, samples: int, *, seed: int = 0, shuffle: bool = True, length: int | None = None) -> None:
        self._samples, self._seed, self._shuffle, self._length = samples, seed, shuffle, length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch's order and augmentations. Call it before each epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[SampleKey]:
        epoch = self.epoch  # now: a later set_epoch is for the next iterator
        rounds = itertools.count(epoch) if self._length is not None else (epoch,)
        keys = (SampleKey(epoch, sample) for number in rounds for sample in self.order(number))
        return itertools.islice(keys, len(self))

    def __len__(self) -> int:
        return self._samples if self._length is None else self._length

    def order(self, epoch: int) -> list[int]:
        """The samples in the order of an epoch."""
        if not self._shuffle:
            return list(range(self._samples))
        order: list[int] = (
            np.random.default_rng(derive_seed(self._seed, "order", epoch)).permutation(self._samples).tolist()
        )
        return order


class ShuffledBatches:
    """A sampler's samples in batches, for ``DataLoader(batch_sampler=...)`` over a data set with ``__getitems__``.

    :param sampler: yields :class:`SampleKey`, or indices for the current epoch
    :param batch_size: samples per batch
    :param drop_last: leave out the last batch if it is not full
    """

    def __init__(self, sampler: Iterable[int | SampleKey], batch_size: int, *, drop_last: bool = False) -> None:
        self._sampler, self._batch_size, self._drop_last = sampler, batch_size, drop_last
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[BatchKey]:
        return self._batches(iter(self._sampler), self._epoch)

    def _batches(self, keys: Iterator[int | SampleKey], epoch: int) -> Iterator[BatchKey]:
        while batch := list(itertools.islice(keys, self._batch_size)):
            if len(batch) == self._batch_size or not self._drop_last:
                yield as_batch_key(batch, epoch)

    def __len__(self) -> int:
        full, rest = divmod(len(self._sampler), self._batch_size)  # type: ignore[arg-type]
        return full + (rest > 0 and not self._drop_last)


def as_batch_key(batch: BatchKey | Sequence[int | SampleKey], epoch: int) -> BatchKey:
    """Convert an element of any batch sampler to a :class:`BatchKey`; plain indices belong to ``epoch``."""
    if isinstance(batch, BatchKey):
        return batch
    keys = [key if isinstance(key, SampleKey) else SampleKey(epoch, int(key)) for key in batch]
    return BatchKey(keys[0].epoch if keys else epoch, np.array([key.sample for key in keys], np.int64))
