"""Before a fork, threads of C++ come to rest: in older Pythons a child may otherwise wait for one of them for ever.

A child of fork has no thread but the one that forked, and all locks as they were. CPython makes its own anew, but before
3.10.15 and 3.11.10 it first takes the lock of the list of thread states (https://github.com/python/cpython/issues/112275).
Python's own threads hold that lock only together with the GIL, and so never while another forks. A thread of C++ takes it
before the GIL, when it has to do with a Python object; gloo's may, as they give back the tensors of a collective, and loader
workers are often forked right after one. About one of fifty short runs with ``--workers 2`` had a child that waited for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Collection

import torch.distributed as dist

LOOK_S = 0.001
ENOUGH_S = 0.1  # a thread that is still at work then computes


def has_the_defect(python: tuple[int, ...]) -> bool:
    """Whether children of this version of Python may wait for ever."""
    return python < (3, 10, 15) or (3, 11) <= python < (3, 11, 10)


@functools.cache  # once is enough
def rest_before_forks() -> None:
    """From now on, where it is needed."""
    if has_the_defect(sys.version_info[:3]):
        os.register_at_fork(before=let_threads_rest)


def let_threads_rest() -> None:
    """Give the other threads the GIL until none of C++ is running. Those that wait for something hold no lock."""
    if not dist.is_initialized():
        return
    of_python = {threading.get_native_id(), *(thread.native_id for thread in threading.enumerate())}
    deadline = time.monotonic() + ENOUGH_S
    while time.monotonic() < deadline:
        time.sleep(LOOK_S)
        if not running_threads(of_python):
            break


def running_threads(but: Collection[int | None] = ()) -> list[int]:
    """This process's threads that are on a core or wait for one, by their native ids; none where there is no ``/proc``."""
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
