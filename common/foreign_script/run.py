"""Runs a command with every process of it watched, and ends them all."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.child_processes import adopt_orphans, descendants, end_all_but

INJECT = Path(__file__).parent / "inject"
WATCH_VARIABLE = "FOREIGN_SCRIPT_WATCH"  # by which inject/sitecustomize.py knows what to load
TRACEBACKS_VARIABLE = "FOREIGN_SCRIPT_TRACEBACKS"  # the folder for tracebacks
LOCAL_RANK_VARIABLE = (
    "FOREIGN_SCRIPT_LOCAL_RANK"  # the flag by which a script is told its local rank, and the script's path
)
STACKS_S = 2.0  # for the processes to write where they are


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    :param status: the exit status; None if it was stopped because it took too long
    :param seconds: from its start to its end
    :param stacks: where each process that was stopped was, see :func:`run`
    :param traceback: of the first error that ended a process of it; empty without one
    :param unwatched: the processes that are known not to be watched
    :param missing: functions that the watches look for and torch does not have
    """

    status: int | None
    seconds: float
    stacks: list[str]
    traceback: str
    unwatched: list[str]
    missing: list[str]


def injected(*watches: Path) -> dict[str, str]:
    """The environment variables with which every Python process loads packages that watch it, once it has imported torch.

    :param watches: the ``__init__.py`` of each, with a function ``install``. It is loaded under another name than its own, and may
        import nothing of the project but by a relative import: the script may have modules of these names
    """
    path = os.pathsep.join(filter(None, (os.fspath(INJECT), os.environ.get("PYTHONPATH"))))
    return {WATCH_VARIABLE: os.pathsep.join(map(os.fspath, watches)), "PYTHONPATH": path}


def run(
    command: Sequence[str], environment: Mapping[str, str], timeout: float, notes: Path, output: Path | None
) -> Outcome:
    """Run ``python COMMAND`` and wait for its end; processes that it leaves are ended, too.

    :param command: the script's path, or ``-m`` and a module, and the arguments
    :param environment: of all processes, with :func:`injected`
    :param timeout: seconds after which the run is stopped
    :param notes: a folder for files of each process: ``PID.traceback`` if an error ends it, and ``PID.unwatched`` and ``PID.missing``,
        which have the lines of :class:`Outcome`. It is also the one with a file ``PID.stack`` of each that
        can write its stack there on SIGUSR2. They are asked to before the run is stopped
    :param output: file for what the script prints; without one, that goes to stderr
    """
    adopt_orphans()
    before, began, status = descendants(), time.monotonic(), None
    try:
        with (
            contextlib.suppress(subprocess.TimeoutExpired),
            open(output, "w") if output else contextlib.nullcontext(sys.stderr) as file,
        ):
            process = subprocess.Popen(
                [sys.executable, *command],
                env={**environment, TRACEBACKS_VARIABLE: os.fspath(notes)},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            status = process.wait(timeout)
        seconds, stacks = time.monotonic() - began, _stacks(notes) if status is None else []
        tracebacks = sorted(notes.glob("*.traceback"), key=lambda path: path.stat().st_mtime_ns)
        traceback = tracebacks[0].read_text() if tracebacks else ""
        unwatched, missing = (_lines(notes, kind) for kind in ("unwatched", "missing"))
        return Outcome(status, seconds, stacks, traceback, unwatched, missing)
    finally:
        end_all_but(before, patiently=status is not None)


def _lines(notes: Path, kind: str) -> list[str]:
    """The lines of all processes, without those that are alike."""
    return sorted({line for path in notes.glob(f"*.{kind}") for line in path.read_text().splitlines()})


def _stacks(notes: Path) -> list[str]:
    """Where each process is, as it writes on a signal."""
    for path in notes.glob("*.stack"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.stem), signal.SIGUSR2)
    time.sleep(STACKS_S)
    return sorted(path.read_text() for path in notes.glob("*.stack"))
