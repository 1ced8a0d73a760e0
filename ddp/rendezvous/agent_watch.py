"""A rank ends with the agent that has started it.

torchrun's agent ends its ranks when it is stopped. When it is killed itself (`kill -9`, the kernel when memory runs out), its
ranks would train on without it: they would not be restarted, and the next start would find their run in use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator

from common.signals.stop_request import end_at_once

logger = logging.getLogger(__name__)

LOOK_S = 0.5
LEAVE_S = 8.0  # for the main thread to save and leave; one that waits in a collective is ended then


@contextlib.contextmanager
def ending_with_agent() -> Iterator[None]:
    """Within this block, the death of this process's parent, torchrun's agent, is a request to stop, as SIGTERM is."""
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(os.getppid(), over), name="agent watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watch(agent: int, over: threading.Event) -> None:
    while not over.wait(LOOK_S):
        if os.getppid() == agent:  # an orphan gets another parent
            continue
        logger.error(
            f"torchrun (process {agent}) has ended without its ranks, most likely by SIGKILL: this rank leaves too"
        )
        os.kill(os.getpid(), signal.SIGTERM)
        if not over.wait(LEAVE_S):
            end_at_once(1)
        return
