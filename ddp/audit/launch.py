"""Runs a script on ranks, with every process watched."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from common.foreign_script.run import Outcome, injected
from common.foreign_script.start import STAND_IN, environment_for, run_ranks

WATCH = Path(__file__).parent / "watch" / "__init__.py"
SYNC_BATCHNORM = Path(__file__).parents[1] / "sync_batchnorm.py"


def run(
    arguments: Sequence[str],
    ranks: int,
    directory: Path,
    *,
    timeout: float,
    quick: bool,
    device: str,
    start: str,
    nodes: int,
    kill_at: int | None,
    batches: str,
    output: Path | None,
) -> Outcome:
    """Run ``python ARGUMENTS`` on so many ranks, and write down what they do.

    :param arguments: the script's path, or ``-m`` and a module, and its own arguments
    :param directory: of the events
    :param timeout: seconds after which the run is stopped
    :param device: as in :func:`common.foreign_script.start.environment_for`
    :param start: one of :data:`common.foreign_script.start.STARTS`
    :param nodes: each with an agent of torchrun
    :param batches: as :class:`ddp.audit.vary.Plan` has it
    :param kill_at: each rank is killed after so many optimizer steps
    :param output: file for what the script prints; without one, that goes to stderr
    """
    watches = [STAND_IN, WATCH] if device == "stand-in" else [WATCH]
    environment = {
        **environment_for(device, ranks, arguments, SYNC_BATCHNORM),
        **injected(*watches),
        "DDP_AUDIT_DIRECTORY": os.fspath(directory),
        "DDP_AUDIT_QUICK": "1" if quick else "",
        "DDP_AUDIT_KILL_AT": str(kill_at or 0),
        "DDP_AUDIT_BATCHES": batches,
    }
    if batches and "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(json.loads(batches)[0])  # the cores of all ranks
    return run_ranks(arguments, ranks, start, environment, timeout, directory, output, nodes)
