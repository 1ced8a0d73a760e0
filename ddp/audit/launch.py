"""Runs a script on ranks, as torchrun or the script itself starts them, with every process watched."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.child_processes import adopt_orphans, descendants, end_all_but

INJECT = Path(__file__).parent / "inject"
STARTS_ITSELF = ("mp.spawn(", "multiprocessing.spawn(", "start_processes(", "notebook_launcher(")
STACKS_S = 2.0  # for the ranks to write where they are


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    :param status: the exit status; None if it was stopped because it took too long
    :param seconds: from its start to its end
    :param stacks: of each rank that was stopped, where it was
    """

    status: int | None
    seconds: float
    stacks: list[str]


def starts_itself(arguments: Sequence[str]) -> bool:
    """Whether a script starts its own ranks."""
    with contextlib.suppress(OSError):
        return any(call in Path(arguments[0]).read_text() for call in STARTS_ITSELF)
    return False


def run(
    arguments: Sequence[str],
    ranks: int,
    directory: Path,
    timeout: float,
    quick: bool,
    kill_at: int | None = None,
    output: Path | None = None,
) -> Outcome:
    """Run ``python ARGUMENTS`` on so many ranks, and write down what they do.

    :param arguments: the script's path, or ``-m`` and a module, and its own arguments
    :param directory: of the events
    :param timeout: seconds after which the run is stopped
    :param kill_at: each rank is killed after so many optimizer steps
    :param output: file for what the script prints; without one, that goes to stderr
    """
    env = {
        "OMP_NUM_THREADS": "1",  # as torchrun sets it, which then does not warn of it
        **os.environ,
        "DDP_AUDIT_DIRECTORY": os.fspath(directory),
        "DDP_AUDIT_QUICK": "1" * quick,
        "DDP_AUDIT_KILL_AT": str(kill_at or 0),
        "PYTHONPATH": os.pathsep.join(filter(None, (os.fspath(INJECT), os.environ.get("PYTHONPATH")))),
    }
    # Without torch, whose import takes as long as a small script.
    if len(list(Path("/dev").glob("nvidia[0-9]*"))) < ranks:
        env["CUDA_VISIBLE_DEVICES"] = ""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [sys.executable, *([] if starts_itself(arguments) else torchrun), *arguments]
    adopt_orphans()
    before, began, status = descendants(), time.monotonic(), None
    try:
        with (
            contextlib.suppress(subprocess.TimeoutExpired),
            open(output, "w") if output else contextlib.nullcontext(sys.stderr) as file,
        ):
            process = subprocess.Popen(command, env=env, stdout=file, stderr=file, start_new_session=True)
            status = process.wait(timeout)
        return Outcome(status, time.monotonic() - began, [] if status is not None else _stacks(directory))
    finally:
        end_all_but(before, patiently=status is not None)


def _stacks(directory: Path) -> list[str]:
    """Where each rank is, as it writes on a signal."""
    for path in directory.glob("*.stack"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.stem), signal.SIGUSR2)
    time.sleep(STACKS_S)
    return sorted(path.read_text() for path in directory.glob("*.stack"))
