"""Stop signals during the imports, which take seconds: one line, and the status that they have later.

Python's default would be a traceback from inside an import for Ctrl-C, and for SIGTERM a status that no scheduler takes for a
preemption. Each subject's package calls :func:`common.signals.handle_signals_of_a_command`, before anything heavy is
imported. Nothing is open by then, so the process may end at once.
"""

from __future__ import annotations

import atexit
import os
import signal
import types

from common.signals import stop_request
from common.signals.stop_request import SIGNALS, exit_status, is_requeued

# The signals that are handled here; none in a process that was not started as a command.
handled: list[signal.Signals] = []
_status: int | None = None  # of a command that has ended


def handle_signals(requeued: str | None = None) -> None:
    """From here on, a stop signal ends this process; a signal that it was started to ignore (``nohup``) stays ignored.

    :param requeued: the module that a scheduler starts again after a signal
    """
    stop_request.requeued_command = requeued
    handled.extend(number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN)
    for number in handled:
        signal.signal(number, _end)


def begin() -> None:
    """The imports are over: Python's defaults again. From now on something is open, which Ctrl-C must let be closed. (A command
    that is to be requeued hears the others until it has handlers of its own, so that its status is the same at any moment.)"""
    for number in handled:
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        elif not is_requeued():
            signal.signal(number, signal.SIG_DFL)


def leave_with(status: int) -> None:
    """The command has ended with this status. A stop signal that comes now changes nothing, and ends the process silently. (In a
    process that is no command, as when its functions are called by another program, nothing is done.)"""
    global _status
    if not handled:
        return
    if _status is None:
        atexit.register(_ignore)
    _status = status
    for number in handled:
        signal.signal(number, _end)


def _ignore() -> None:
    """While Python shuts down it sets handlers back to the default, by which a signal would change the status; but it leaves
    signals that are ignored."""
    for number in handled:
        signal.signal(number, signal.SIG_IGN)


def _end(number: int, frame: types.FrameType | None) -> None:
    if _status is not None:
        os._exit(_status)
    message = f"stopped by {signal.Signals(number).name} before the command began\n"
    try:
        os.write(2, message.encode())
    finally:
        os._exit(exit_status([number]) if is_requeued() else 128 + number)
