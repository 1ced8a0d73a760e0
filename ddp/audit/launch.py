"""Runs a script on ranks, as torchrun or the script itself starts them, with every process watched."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from common.foreign_script.run import Outcome, injected
from common.foreign_script.run import run as run_watched

WATCH = Path(__file__).parent / "watch" / "__init__.py"
STARTS_ITSELF = ("mp.spawn(", "multiprocessing.spawn(", "start_processes(", "notebook_launcher(")


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
    environment = {
        "OMP_NUM_THREADS": "1",  # as torchrun sets it, which then does not warn of it
        **os.environ,
        **injected(WATCH),
        "DDP_AUDIT_DIRECTORY": os.fspath(directory),
        "DDP_AUDIT_QUICK": "1" if quick else "",
        "DDP_AUDIT_KILL_AT": str(kill_at or 0),
    }
    # Without torch, whose import takes as long as a small script.
    if len(list(Path("/dev").glob("nvidia[0-9]*"))) < ranks:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = list(arguments) if starts_itself(arguments) else [*torchrun, *arguments]
    return run_watched(command, environment, timeout, directory, output)
