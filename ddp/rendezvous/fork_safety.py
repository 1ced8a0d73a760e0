"""Safe forks: in older Pythons, a fork while a C++ thread holds a lock may leave the child waiting for that lock for ever.

A child of fork has only the thread that forked, but all locks as they were. CPython makes its own locks anew. Before 3.10.15
and 3.11.10, however, it first takes the lock of the list of thread states (https://github.com/python/cpython/issues/112275).
Python threads hold that lock only together with the GIL, and so never while another thread forks. A C++ thread takes it before
the GIL, when it has to handle a Python object: gloo's threads do, as they free the tensors of a collective. Loader workers are
often forked right after one. In about one of fifty short runs with ``--workers 2``, a child waited for ever.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Collection

import torch.distributed as dist

LOOK_S = 0.001
ENOUGH_S = 0.1  # a thread that still runs then is computing, and holds no lock


@functools.cache  # registered once
def rest_before_forks() -> None:
    """Call :func:`let_threads_rest` before every fork from now on. For Pythons with the defect."""
    os.register_at_fork(before=let_threads_rest)


def let_threads_rest() -> None:
    """Wait, without the GIL, until no C++ thread runs. Threads that wait for something hold no lock."""
    if not dist.is_initialized():
        return
    of_python = {threading.get_native_id(), *(thread.native_id for thread in threading.enumerate())}
    deadline = time.monotonic() + ENOUGH_S
    while time.monotonic() < deadline:
        time.sleep(LOOK_S)
        if not running_threads(of_python):
            break


def running_threads(but: Collection[int | None] = ()) -> list[int]:
    """Native ids of this process's threads that run or are ready to run; empty where there is no ``/proc``.

    :param but: native ids to leave out
    """
    running = []
    with contextlib.suppress(FileNotFoundError):
        for task in os.listdir("/proc/self/task"):
            with (
                contextlib.suppress(FileNotFoundError, ProcessLookupError),
                open(f"/proc/self/task/{task}/stat") as file,
            ):
                state = file.read().rpartition(")")[2].split()[0]
                if state != "S" and int(task) not in but:
                    running.append(int(task))
    return running
