"""How many workers hang because a thread of the process that starts them holds a lock.

    python -m dataloading.bench.held_lock fork 1000

A fork copies the locks of the process and of its threads only the one that forks. If another thread holds a lock at that
moment, the copy is never released. Nothing heavy is imported here, so that spawned workers are light.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from typing import Any

GROUP = 250  # workers that are started at once
WAIT_S = 60.0  # until a worker counts as hanging; it has nothing to do but to take the lock

lock = threading.Lock()


def hold_half_of_the_time() -> None:
    while True:
        with lock:
            time.sleep(0.001)
        time.sleep(0.001)


def take_the_lock() -> None:
    """A whole worker."""
    with lock:
        pass


def count_hanging(method: str, starts: int, wait_s: float = WAIT_S) -> int:
    """Start workers at once, and return how many of them never end.

    :param method: of multiprocessing, or ``threads``
    """
    context: Any = threading if method == "threads" else multiprocessing.get_context(method)
    make = context.Thread if method == "threads" else context.Process
    workers = [make(target=take_the_lock, daemon=True) for _ in range(starts)]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + wait_s
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    hanging = [worker for worker in workers if worker.is_alive()]
    for worker in hanging:
        worker.kill()
        worker.join()
    return len(hanging)


if __name__ == "__main__":
    threading.Thread(target=hold_half_of_the_time, daemon=True).start()
    print(sum(count_hanging(sys.argv[1], GROUP) for _ in range(int(sys.argv[2]) // GROUP)))
