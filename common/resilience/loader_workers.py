"""Settings for ``DataLoader`` workers: a worker that dies ends the run with a message, a worker that is stopped with none."""

from __future__ import annotations

import sys

from torch.utils.data._utils import signal_handling


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
