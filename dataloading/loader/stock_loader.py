"""torch's own ``DataLoader`` for images in files: it checks shared memory first and does not warn of many workers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from common.data import loaders

FLOAT_BYTES = 4


def stock_loader(dataset: Any, workers: int, *, image_bytes: int = 0, **settings: Any) -> DataLoader[Any]:
    """Construct a ``DataLoader``, without its warning of more workers than cores, which a benchmark may try.

    :param workers: loader processes; 0 loads in the main process
    :param image_bytes: bytes per image. If given, check that /dev/shm holds all prefetched batches
    :param settings: other arguments of ``DataLoader``
    :raises UsageError: if /dev/shm is too small, or memory for so many workers
    """
    batch_bytes = image_bytes * settings.get("batch_size", 1)
    with _no_warning_of_many_workers():
        return loaders.stock_loader(dataset, workers, batch_bytes=batch_bytes, **settings)


def iterate(loader: Iterable[Any]) -> Iterator[Any]:
    """The loader's iterator, without the same warning."""
    with _no_warning_of_many_workers():
        return iter(loader)


@contextlib.contextmanager
def _no_warning_of_many_workers() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield
