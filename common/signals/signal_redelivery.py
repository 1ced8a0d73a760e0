"""What a stop signal and a ``__del__`` do to each other: one that arrives during a ``__del__`` is sent again.

Python prints and drops an exception that is raised while an object is finalized. ``DataLoader`` ends its workers there, which
takes so long that Ctrl-C or a scheduler's SIGTERM may arrive during it. The program would then go on.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

PAUSE_S = 0.01  # until the finalizer is over


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
            threading.Timer(PAUSE_S, os.kill, (os.getpid(), number)).start()

    sys.unraisablehook = dropped
    try:
        yield
    finally:
        sys.unraisablehook = others


def finalize_silently() -> None:
    """From here on, Python does not print what a ``__del__`` raises. For a process that a stop signal ends: what the signal met
    half built cannot always be finalized, as an iterator of ``DataLoader`` that had no workers yet (torch 2.15)."""
    sys.unraisablehook = lambda unraisable: None
