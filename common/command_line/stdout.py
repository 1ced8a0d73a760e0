"""Results first, talking last: what stdout cannot take is no failure of a run whose results are on the disk."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

from common.errors import UsageError

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def stdout_errors() -> Iterator[None]:
    """A block that prints. After the reader has ended (``| head -1``), the rest is dropped.

    :raises UsageError: when stdout cannot be written for another reason, such as a full disk
    """
    stdout = sys.stdout
    if stdout is None:  # the shell has closed it, and Python prints nothing
        yield
        return
    if hasattr(stdout, "reconfigure"):
        stdout.reconfigure(errors="backslashreplace")  # as stderr: no name of a file is too strange to be printed
    sys.stdout = _Stdout(stdout)
    try:
        yield
        sys.stdout.flush()
    except SystemExit:
        sys.stdout.flush()
        raise
    finally:
        sys.stdout = stdout


def print_results(text: str) -> None:
    """Print the summary of results that are on the disk. If it cannot be printed, that is a warning."""
    try:
        with stdout_errors():
            print(text)
    except UsageError as error:
        logger.warning("%s: the summary is lost, the results are complete", error)


class _Stdout:
    """A stream whose errors can be distinguished from those of other files."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._errors():
            return int(self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        with self._errors():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # or Python would fail when it exits
            if not isinstance(error, BrokenPipeError):
                raise UsageError(f"stdout cannot be written ({error.strerror})") from error
