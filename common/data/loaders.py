"""torch's own ``DataLoader``, with two fixes for its workers: dead ones are found, stopped ones end quietly."""

from __future__ import annotations

import sys
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

PREFETCH_FACTOR = 2  # DataLoader's own default


def stock_loader(
    dataset: Any, workers: int, *, batch_bytes: int = 0, ranks: int = 1, **settings: Any
) -> DataLoader[Any]:
    """Construct a ``DataLoader`` whose dead workers are found and whose stopped workers end quietly.

    :param workers: loader processes; 0 loads in the main process
    :param batch_bytes: bytes of a batch, if it is known; all that are prefetched must fit into ``/dev/shm``
    :param ranks: of this node, each with a loader like this one
    :param settings: other arguments of ``DataLoader``
    :raises UsageError: when shared memory, or memory, is too small for so many workers
    """
    if workers:
        from common.data.loader_limits import (
            require_room_for_workers,
            require_shared_memory,
            require_short_temporary_folder,
        )

        require_room_for_workers(workers, ranks)
        require_short_temporary_folder()
        require_shared_memory(batch_bytes * workers * ranks * settings.get("prefetch_factor", PREFETCH_FACTOR))
    poll_for_deaths()
    return DataLoader(dataset, num_workers=workers, **{"worker_init_fn": start_worker, **settings})


def poll_for_deaths() -> None:
    """Let ``DataLoader`` find dead workers by polling, within five seconds. To be called before workers are started.

    Its SIGCHLD handler would raise an exception at any point of the main thread. In ``Queue.put``, the lock would then stay
    locked, and the process would hang when the loader is closed (torch/utils/data/_utils/signal_handling.py).
    """
    signal_handling._SIGCHLD_handler_set = True


def start_worker(worker: int) -> None:
    """The ``worker_init_fn``: no traceback when the rank is stopped while the worker hands over a batch.

    multiprocessing's server of file descriptors would print that of the broken connection.

    :param worker: the worker's number
    """
    report = sys.excepthook
    sys.excepthook = lambda kind, error, trace: (
        None if issubclass(kind, ConnectionError) else report(kind, error, trace)
    )
