"""Stopping at leisure: a signal is a request, which the training loop answers when its step is done.

Schedulers announce a preemption by SIGTERM or SIGUSR1, a terminal sends SIGINT, and torchrun passes on what it gets; so one
Ctrl-C may come twice. Who does not want to wait sends a second one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing.util import register_after_fork
from typing import TypeVar

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_REQUEST_S = 1.0  # signals that come so soon after the first are the same request by another way
REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: a temporary failure, to be tried again
INTERRUPTED = 130  # what a shell reports of a command that Ctrl-C has ended

T = TypeVar("T")


class StopRequest:
    """Whether somebody has asked this process to stop.

    ``number`` is the signal that did, or None.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._asked_at = 0.0

    def __bool__(self) -> bool:
        return self.number is not None

    def before(self, items: Iterable[T]) -> Iterator[T]:
        """The items, until the request comes."""
        for item in items:
            if self:
                return
            yield item

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Take the signals as requests, for the length of the block; a second one ends the process at once.

        Python runs handlers in the main thread, and not while that waits for another rank inside C++. But the number of each
        signal is written to a descriptor at once (``signal.set_wakeup_fd``), where a thread reads it.
        """
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        thread = threading.Thread(target=self._read, args=(reader,), name="stop requests", daemon=True)
        thread.start()
        # A loader worker is forked with all this. Its rank ends it, and no signal that it gets is its rank's.
        register_after_fork(self, lambda _: signal.set_wakeup_fd(-1))
        before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        others = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield self
        finally:
            signal.set_wakeup_fd(others)
            for number, handler in before.items():
                signal.signal(number, handler)
            writer.shutdown(socket.SHUT_WR)  # closing it would not do: loader workers have copies
            thread.join()
            writer.close()
            reader.close()

    def _read(self, reader: socket.socket) -> None:
        while numbers := reader.recv(1):
            (number,) = numbers
            now = time.monotonic()
            if number not in SIGNALS:
                continue
            if self.number is None:
                self.number, self._asked_at = number, now
            elif now - self._asked_at > SAME_REQUEST_S:
                for child in multiprocessing.active_children():
                    child.kill()
                os._exit(exit_status([number]))


@contextlib.contextmanager
def to_be_requeued() -> Iterator[None]:
    """A block that a signal may end before or after it listens (see ``common.distributed.process_group.stop_signals``), with the same
    exit status."""
    try:
        yield
    except SystemExit as end:
        numbers = [number for number in SIGNALS if end.code == 128 + number]
        raise SystemExit(exit_status(numbers) if numbers else end.code) from end


def signal_name(number: int) -> str:
    """``SIGTERM`` for 15."""
    return signal.Signals(number).name


def exit_status(numbers: Iterable[int | None]) -> int:
    """How a job leaves that was asked to stop by these signals, None for a rank that got none: a person's Ctrl-C ends it;
    after any other signal it is to be started again."""
    asked = {number for number in numbers if number is not None}
    return INTERRUPTED if asked == {signal.SIGINT} else REQUEUE
