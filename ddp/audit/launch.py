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

INJECT = Path(__file__).parent / "inject"
STARTS_ITSELF = ("mp.spawn(", "multiprocessing.spawn(", "start_processes(", "notebook_launcher(")
STACKS_S, END_S = 2.0, 1.0


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


def run(arguments: Sequence[str], ranks: int, directory: Path, timeout: float, quick: bool) -> Outcome:
    """Run ``python ARGUMENTS`` on so many ranks, and write down what they do.

    :param arguments: the script's path, or ``-m`` and a module, and its own arguments
    :param directory: of the events
    :param timeout: seconds after which the run is stopped
    """
    env = {**os.environ, "DDP_AUDIT_DIRECTORY": os.fspath(directory), "DDP_AUDIT_QUICK": "1" if quick else ""}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (os.fspath(INJECT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, *arguments]
    if not starts_itself(arguments):
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command = [sys.executable, *torchrun, *arguments]
    env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun sets it, which then does not warn of it
    if _gpus() < ranks:
        env["CUDA_VISIBLE_DEVICES"] = ""
    began = time.monotonic()
    process = subprocess.Popen(command, env=env, stdout=sys.stderr, start_new_session=True)
    try:
        status = process.wait(timeout)
        time.sleep(
            END_S * bool(status)
        )  # what the script still has to say, such as an error line behind that of torchrun
        return Outcome(status, time.monotonic() - began, [])
    except subprocess.TimeoutExpired:
        return Outcome(None, time.monotonic() - began, _stacks(directory))
    finally:
        _kill(process.pid)


def _gpus() -> int:
    """Asked without torch, whose import takes as long as a small script."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _stacks(directory: Path) -> list[str]:
    """Where each rank is, as it writes on a signal."""
    for path in directory.glob("*.stack"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.stem), signal.SIGUSR2)
    time.sleep(STACKS_S)
    return [path.read_text() for path in sorted(directory.glob("*.stack"), key=lambda path: int(path.stem))]


def _kill(pid: int) -> None:
    """End a process and all that it has started."""
    import psutil  # not at the top: --help needs it not

    with contextlib.suppress(psutil.NoSuchProcess):
        tree = psutil.Process(pid).children(recursive=True)
        for process in (psutil.Process(pid), *tree):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
