"""Ctrl-C, SIGTERM and SIGUSR1 end a program as an exception does: workers, files and the process group are closed."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import types
from collections.abc import Iterator

from common.resilience.signal_redelivery import keep_stops
from common.resilience.stop_request import SIGNALS

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGUSR1 unwind the stack as ``SystemExit``, so that workers, files and a group are closed.

    A second Ctrl-C does not interrupt the unwinding: the terminal and torchrun may both send the first one. A second SIGTERM
    ends the process at once.
    """

    owner = os.getpid()

    def stop(number: int, frame: types.FrameType | None) -> None:
        if os.getpid() != owner:  # a loader worker, which was forked with this handler; its rank ends it
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        logger.warning("stopped by %s", signal.Signals(number).name)
        raise SystemExit(128 + number)

    def stopped_by(error: BaseException) -> int | None:
        if os.getpid() != owner or not isinstance(error, SystemExit) or not isinstance(error.code, int):
            return None
        signal.signal(error.code - 128, stop)  # stop() had replaced itself
        return error.code - 128

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        with keep_stops(stopped_by):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
