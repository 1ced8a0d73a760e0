"""A stop that lands in a ``__del__`` is asked for again.

Python drops whatever is raised while an object is finalized, and prints it. ``DataLoader`` ends its workers there, which
takes long enough for Ctrl-C or a scheduler's SIGTERM to come in just then; the program would go on as if nobody had asked.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

PAUSE_S = 0.01  # the finalizer is over then


@contextlib.contextmanager
def keep_stops(signal_of: Callable[[BaseException], int | None]) -> Iterator[None]:
    """Send this process the signal again whose exception was dropped.

    :param signal_of: the signal that raised an exception; None for an exception that is no stop
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
