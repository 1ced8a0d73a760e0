"""A graceful stop: a signal is a request, which the training loop answers when its step is done.

Schedulers announce a preemption by SIGTERM or SIGUSR1. A terminal sends SIGINT, and SIGHUP when it is closed. Torchrun passes
on the signals that it gets, so that one Ctrl-C may come twice. A later second signal ends the process at once.

A stop signal that arrives inside a ``__del__`` is sent again: Python prints and drops an exception that is raised while an object is
finalized. ``DataLoader`` ends its workers there, which takes so long that Ctrl-C or a scheduler's SIGTERM may arrive during it. The
program would then go on.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.util import register_after_fork
from typing import Any, NoReturn

PAUSE_S = 0.01  # between two looks at whether the finalizer is over


@contextlib.contextmanager
def keep_stops(signal_of: Callable[[BaseException], int | None]) -> Iterator[None]:
    """If Python drops the exception of a stop signal within this block, send the signal again.

    :param signal_of: returns the signal that raised an exception; None for any other exception
    """
    others = sys.unraisablehook

    def dropped(unraisable: Any) -> None:
        number = signal_of(unraisable.exc_value) if unraisable.exc_value is not None else None
        if number is None:
            others(unraisable)
        else:
            threading.Thread(target=_send_again, args=(number, sys._getframe())).start()

    sys.unraisablehook = dropped
    try:
        yield
    finally:
        sys.unraisablehook = others


def _send_again(number: int, hook: types.FrameType) -> None:
    """Send a signal when the hook is over: what a signal raises in it would be dropped for good."""
    is_over = False
    while not is_over:
        time.sleep(PAUSE_S)
        with contextlib.suppress(RuntimeError):  # it runs
            hook.clear()
            is_over = True
    os.kill(os.getpid(), number)


def finalize_silently() -> None:
    """From here on, Python prints no exception of a ``__del__``. For a process that a stop signal ends: what the signal met
    half built cannot always be finalized, as an iterator of ``DataLoader`` that had no workers yet (torch 2.15)."""
    sys.unraisablehook = lambda unraisable: None


logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)  # the last: a terminal was closed
SAME_REQUEST_S = 1.0  # signals that follow the first so soon are the same request, passed on by torchrun
REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: a temporary failure; the scheduler should start the job again
INTERRUPTED = 130  # the status that a shell reports for a command that Ctrl-C ended
STOPPED = tuple(128 + number for number in SIGNALS)  # statuses of commands that are not requeued

requeued_command: str | None = None  # the module that a scheduler starts again after a signal; its package names it
STUCK_S = 5.0  # a signal waits so long for the main thread to come back from C++; then the process ends


class StopTogether(SystemExit):
    """All ranks leave after the same step, since one of them was asked to stop."""

    seen_by_all = True


class StopRequest:
    """Whether a signal has asked this process to stop; ``number`` is that signal, or None."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._asked_at = 0.0

    def __bool__(self) -> bool:
        return self.number is not None

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Within this block, signals are requests; a second one ends the process at once."""
        with _noticed_at_once(self._note), _handled_by(lambda *_: None):
            yield self

    def _note(self, number: int) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number, self._asked_at = number, now
        elif now - self._asked_at > SAME_REQUEST_S:
            os.write(2, f"stopped at once by a second {signal_name(number)}\n".encode())
            end_at_once(exit_status([number]))


@contextlib.contextmanager
def _noticed_at_once(notice: Callable[[int], None]) -> Iterator[None]:
    """Within this block, a thread calls ``notice`` with the number of each of :data:`SIGNALS` that comes.

    Python runs signal handlers in the main thread, but not while that waits for another rank inside C++. The number of
    each signal is also written to a descriptor at once (``signal.set_wakeup_fd``), from which the thread reads it.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def read() -> None:
        while numbers := reader.recv(1):
            if numbers[0] in SIGNALS:
                notice(numbers[0])

    thread = threading.Thread(target=read, name="stop requests", daemon=True)
    thread.start()
    # A forked loader worker inherits the descriptor: the signals that it gets must not count as its rank's.
    register_after_fork(thread, lambda _: signal.set_wakeup_fd(-1))
    # The descriptor before the handlers, and after them at the end: in between, a signal meets both, and not neither.
    others = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(others)
        writer.shutdown(socket.SHUT_WR)  # not close(): loader workers have copies of the descriptor
        thread.join()
        writer.close()
        reader.close()


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, types.FrameType | None], None]) -> Iterator[None]:
    """Within this block, Python calls this handler for the signals that are heard."""
    before = {number: signal.signal(number, handler) for number in handled_signals()}
    try:
        yield
    finally:
        for number, other in before.items():
            signal.signal(number, other)


def end_at_once(status: int) -> NoReturn:
    """End this process and its loader workers, without any cleaning up."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(status)


@contextlib.contextmanager
def to_be_requeued() -> Iterator[None]:
    """A block that ends with the same exit status whether a signal arrives while :class:`StopRequest` listens, before or after."""
    try:
        yield
    except SystemExit as end:
        numbers = [number for number in SIGNALS if end.code == 128 + number]
        raise SystemExit(exit_status(numbers) if numbers else end.code) from end


def is_requeued() -> bool:
    """Whether a scheduler starts this process's command again after a signal other than Ctrl-C."""
    return requeued_command in sys.orig_argv


def handled_signals() -> list[signal.Signals]:
    """:data:`SIGNALS`, but not SIGHUP for a process that was started by ``nohup``."""
    return [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


@contextlib.contextmanager
def unwrapped_stops() -> Iterator[None]:
    """A block from which a stop comes as the ``SystemExit`` that it is, also if the code that it met has made another exception of
    it. Python before 3.12 does so in ``__set_name__``, which each dataclass calls when its module is imported."""
    try:
        yield
    except Exception as error:
        behind: BaseException | None = error
        while behind is not None and not isinstance(behind, SystemExit):
            behind = behind.__cause__ or behind.__context__
        if behind is None or behind.code not in STOPPED:
            raise
        raise behind from None


def signal_name(number: int) -> str:
    """``SIGTERM`` for 15."""
    return signal.Signals(number).name


def exit_status(numbers: Iterable[int | None]) -> int:
    """The exit status of a job after these signals: after Ctrl-C it has ended; after any other it should be started again.

    :param numbers: each rank's signal; None for a rank that got none
    """
    asked = {number for number in numbers if number is not None}
    return INTERRUPTED if asked == {signal.SIGINT} else REQUEUE


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP unwind the stack as ``SystemExit``, so that workers, files and a group are closed.

    A second Ctrl-C does not interrupt the unwinding: the terminal and torchrun may both send the first one. A second SIGTERM
    ends the process at once. So does the first one after :data:`STUCK_S` in which the main thread did not come back from C++:
    a rank that waits at the rendezvous for another would hear it only after the timeout.
    """

    owner, heard = os.getpid(), threading.Event()

    def stop(number: int, frame: types.FrameType | None) -> None:
        if os.getpid() != owner:  # a loader worker, which was forked with this handler; its rank ends it
            return
        heard.set()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        logger.warning("stopped by %s", signal.Signals(number).name)
        raise SystemExit(128 + number)

    def stopped_by(error: BaseException) -> int | None:
        if os.getpid() != owner or not isinstance(error, SystemExit) or not isinstance(error.code, int):
            return None
        signal.signal(error.code - 128, stop)  # stop() had replaced itself
        return error.code - 128

    def end_if_stuck(number: int) -> None:
        if not heard.wait(STUCK_S):
            os.write(
                2,
                f"stopped by {signal_name(number)}, which waited {STUCK_S:g} s for a call into C++ to return\n".encode(),
            )
            end_at_once(exit_status([number]) if is_requeued() else 128 + number)

    with (
        _noticed_at_once(end_if_stuck),
        contextlib.ExitStack() as at_the_end,
        _handled_by(stop),
        keep_stops(stopped_by),
    ):
        at_the_end.callback(heard.set)  # a signal that came last is not waited for
        yield
