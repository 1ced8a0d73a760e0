"""Runs a command with every process of it watched, and ends them all."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.child_processes import adopt_orphans, descendants, end_all_but

INJECT = Path(__file__).parent / "inject"
WATCH_VARIABLE = "FOREIGN_SCRIPT_WATCH"  # by which inject/sitecustomize.py knows what to load
TRACEBACKS_VARIABLE = "FOREIGN_SCRIPT_TRACEBACKS"  # the folder for tracebacks
LOCAL_RANK_VARIABLE = "FOREIGN_SCRIPT_LOCAL_RANK"  # a flag, and the script or module that is told its local rank by it
ASKED_S = 0.2  # between two questions whether a run is over
STACKS_S = 2.0  # for the processes to write where they are


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    :param status: the exit status; None if it was stopped because it took too long
    :param seconds: from its start to its end
    :param stacks: where each process that was stopped was, see :func:`run`
    :param traceback: of the first error that ended a process of it; empty without one
    """

    status: int | None
    seconds: float
    stacks: list[str]
    traceback: str


def injected(*watches: Path) -> dict[str, str]:
    """The environment variables with which every Python process loads packages that watch it, once it has imported torch.

    :param watches: the ``__init__.py`` of each, with a function ``install``. It is loaded under another name than its own, and may
        import nothing of the project but by a relative import: the script may have modules of these names
    """
    path = os.pathsep.join(filter(None, (os.fspath(INJECT), os.environ.get("PYTHONPATH"))))
    return {WATCH_VARIABLE: os.pathsep.join(map(os.fspath, watches)), "PYTHONPATH": path}


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    timeout: float,
    notes: Path,
    output: Path | None,
    is_over: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run ``python COMMAND`` and wait for its end; processes that it leaves are ended, too.

    :param command: the script's path, or ``-m`` and a module, and the arguments
    :param environment: of all processes, with :func:`injected`
    :param timeout: seconds after which the run is stopped
    :param notes: a folder for a file ``PID.traceback`` of each process that an error ends. Before the run is stopped, each process
        that has a file ``PID.stack`` there is asked, by SIGUSR2, to write its stack
    :param output: file for what the script prints; without one, that goes to stderr
    :param is_over: called every ``ASKED_S`` seconds; True stops the run
    """
    before, began, status = descendants(), time.monotonic(), None
    with open(output, "w") if output else contextlib.nullcontext(sys.stderr) as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            env={**environment, TRACEBACKS_VARIABLE: os.fspath(notes)},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    adopt_orphans()
    try:
        while status is None and time.monotonic() < began + timeout and not is_over():
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(min(timeout, ASKED_S))
        seconds, stacks = time.monotonic() - began, _stacks(notes) if status is None else []
        tracebacks = sorted(notes.glob("*.traceback"), key=lambda path: path.stat().st_mtime_ns)
        traceback = tracebacks[0].read_text() if tracebacks else ""
        return Outcome(status, seconds, stacks, traceback)
    finally:
        end_all_but(before, patiently=status is not None)
        process.poll()  # it has ended; an object that does not know that would warn
        adopt_orphans(False)


def _stacks(notes: Path) -> list[str]:
    """Where each process is, as it writes on a signal."""
    paths = list(notes.glob("*.stack"))
    for path in paths:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.stem), signal.SIGUSR2)
    if paths:
        time.sleep(STACKS_S)
    return sorted(path.read_text() for path in paths)
