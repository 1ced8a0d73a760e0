"""Rank-aware logging and progress: which rank writes what, and where.

Every line carries the rank, the host and the device. The console shows rank 0, and from the others only warnings and
errors; each rank's own file in the run directory has everything, tracebacks included.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from tqdm import tqdm

from common.distributed.dist_env import DistEnv
from common.errors import UsageError
from common.signals.stop_request import unwrapped_stops

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0


class _OneLineAtATime(logging.Handler):
    """A stop signal may come while a line is written, and the signal's handler logs one too. Python's buffers refuse that: the
    second line is kept until the first is written."""

    _kept: list[logging.LogRecord] | None = None  # while a line is written

    def emit(self, record: logging.LogRecord) -> None:
        if self._kept is not None:
            self._kept.append(record)
            return
        kept = self._kept = []
        try:
            super().emit(record)
        finally:  # the handler may end the process by an exception
            self._kept = None
            for one in kept:
                self.emit(one)


class _FileHandler(_OneLineAtATime, logging.FileHandler):
    """Writes to a rank's file."""


class _Console(logging.Handler):
    """Writes to stderr above a progress bar that may be drawn there, and leaves the traceback to Python's own report."""

    def emit(self, record: logging.LogRecord) -> None:
        without_traceback = logging.makeLogRecord({**record.__dict__, "exc_info": None, "exc_text": None})
        line = self.format(without_traceback)
        try:
            tqdm.write(line, file=sys.stderr)
        except OSError:  # the reader of the pipe has ended; training goes on
            self.handleError(record)
        except RuntimeError:  # the signal met the progress bar, which is drawn in the same place
            os.write(2, f"{line}\n".encode())


class _ConsoleHandler(_OneLineAtATime, _Console):
    """The console's, for all but tracebacks."""


@contextlib.contextmanager
def rank_logging(env: DistEnv) -> Iterator[None]:
    """Within this block, send log records to the console and to files; log an exception that ends the block too.

    :param env: this rank; :func:`add_log_file` gives it a file
    """
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    console = _ConsoleHandler(logging.INFO if env.is_main else logging.WARNING)
    console.setFormatter(_formatter(env))
    root.addHandler(console)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        with unwrapped_stops():
            yield
    except Exception as error:
        if not isinstance(error, UsageError):
            # Recorded before the other ranks fail because of this one: torchrun's report is ordered by time.
            get_error_handler().record_exception(error)
            logger.error("%s: %s", type(error).__name__, error, exc_info=True)
        raise
    finally:
        logging.captureWarnings(False)
        root.setLevel(level)
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            root.removeHandler(handler)
            with contextlib.suppress(OSError):  # a full disk, which has been reported before
                handler.close()


def add_log_file(env: DistEnv, folder: Path) -> None:
    """From here to the end of :func:`rank_logging`, also append to ``rank<r>.log`` in ``folder``, tracebacks included."""
    folder.mkdir(parents=True, exist_ok=True)  # another node's disk may lack rank 0's directories
    file = _FileHandler(folder / f"rank{env.rank}.log", encoding="utf-8", errors="backslashreplace")
    file.setFormatter(_formatter(env))
    logging.getLogger().addHandler(file)


def _formatter(env: DistEnv) -> logging.Formatter:
    return logging.Formatter(
        f"%(asctime)s %(levelname)-7s [rank {env.rank}/{env.world_size} {env.host} {env.device}] %(message)s"
    )


class Progress:
    """Rank 0's progress through ``total`` steps: a bar on a terminal, a log line every ten seconds elsewhere."""

    def __init__(self, env: DistEnv, title: str, total: int, initial: int = 0) -> None:
        self._title, self._total, self._done = title, total, initial
        self._silent = not env.is_main
        self._last_line = time.monotonic()
        terminal = env.is_main and sys.stderr.isatty()
        self._bar = tqdm(total=total, initial=initial, desc=title, unit="step", leave=False) if terminal else None

    def advance(self, steps: int, facts: str) -> None:
        """``steps`` more are done; ``facts`` is shown beside the progress (loss, learning rate, images/s)."""
        self._done += steps
        if self._bar is not None:
            self._bar.set_postfix_str(facts, refresh=False)
            self._bar.update(steps)
        elif not self._silent and time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            logger.info("%s: step %d of %d, %s", self._title, self._done, self._total, facts)
            self._last_line = time.monotonic()

    def reach(self, done: int, facts: str) -> None:
        """``done`` steps are done in all; ``facts`` as in :meth:`advance`."""
        self.advance(done - self._done, facts)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()
