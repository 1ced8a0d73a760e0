"""torch's own ``DataLoader`` for images in files: it checks shared memory first and does not warn of many workers."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from common.data import loaders

FLOAT_BYTES = 4


class _DataLoader(DataLoader[Any]):
    def check_worker_number_rationality(self) -> None:
        """No warning of more workers than cores: a benchmark may try them."""


def stock_loader(dataset: Any, workers: int, *, image_bytes: int = 0, **settings: Any) -> DataLoader[Any]:
    """Construct a ``DataLoader``, without its warning of more workers than cores.

    :param workers: loader processes; 0 loads in the main process
    :param image_bytes: bytes per image. If given, check that /dev/shm holds all prefetched batches
    :param settings: other arguments of ``DataLoader``
    :raises UsageError: if /dev/shm is too small, or memory for so many workers
    """
    batch_bytes = image_bytes * settings.get("batch_size", 1)
    return loaders.stock_loader(dataset, workers, batch_bytes=batch_bytes, loader=_DataLoader, **settings)
