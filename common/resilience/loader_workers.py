"""What ``DataLoader``'s workers need so that one that dies ends the run with a message, and one that is stopped with none."""

from __future__ import annotations

import sys

from torch.utils.data._utils import signal_handling


def poll_for_deaths() -> None:
    """Have ``DataLoader`` find a dead worker at its next look, within five seconds; call it before workers are started.

    Its handler of SIGCHLD would raise out of whatever the main thread is doing just then. If that is ``Queue.put``, its lock
    stays taken, and the process hangs when the loader is closed (torch/utils/data/_utils/signal_handling.py).
    """
    signal_handling._SIGCHLD_handler_set = True


def start_worker(worker: int) -> None:
    """The ``worker_init_fn``: a loader worker that is handing over a batch when its rank is stopped has nobody to tell.

    multiprocessing's server of file descriptors would print the broken connection's traceback.
    """
    report = sys.excepthook
    sys.excepthook = lambda kind, error, trace: (
        None if issubclass(kind, ConnectionError) else report(kind, error, trace)
    )
