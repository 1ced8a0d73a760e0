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
LOCAL_RANK_VARIABLE = "FOREIGN_SCRIPT_LOCAL_RANK"  # the flag by which a script is told its local rank, and the script's path
STACKS_S = 2.0  # for the processes to write where they are


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    :param status: the exit status; None if it was stopped because it took too long
    :param seconds: from its start to its end
    :param stacks: where each process that was stopped was, see :func:`run`
    """

    status: int | None
    seconds: float
    stacks: list[str]


def injected(*watches: Path) -> dict[str, str]:
    """The environment variables with which every Python process loads packages that watch it, once it has imported torch.

    :param watches: the ``__init__.py`` of each, with a function ``install``. It is loaded under another name than its own, and may
        import nothing of the project but by a relative import: the script may have modules of these names
    """
    path = os.pathsep.join(filter(None, (os.fspath(INJECT), os.environ.get("PYTHONPATH"))))
    return {WATCH_VARIABLE: os.pathsep.join(map(os.fspath, watches)), "PYTHONPATH": path}


def run(
    command: Sequence[str], environment: Mapping[str, str], timeout: float, stacks: Path, output: Path | None
) -> Outcome:
    """Run ``python COMMAND`` and wait for its end; processes that it leaves are ended, too.

    :param command: the script's path, or ``-m`` and a module, and the arguments
    :param environment: of all processes, with :func:`injected`
    :param timeout: seconds after which the run is stopped
    :param stacks: a folder with a file ``PID.stack`` of each process that can write its stack there on SIGUSR2. They are asked to
        before the run is stopped
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
                [sys.executable, *command], env=environment, stdout=file, stderr=file, start_new_session=True
            )
            status = process.wait(timeout)
        return Outcome(status, time.monotonic() - began, _written(stacks) if status is None else [])
    finally:
        end_all_but(before, patiently=status is not None)


def _written(stacks: Path) -> list[str]:
    """Where each process is, as it writes on a signal."""
    for path in stacks.glob("*.stack"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.stem), signal.SIGUSR2)
    time.sleep(STACKS_S)
    return sorted(path.read_text() for path in stacks.glob("*.stack"))
