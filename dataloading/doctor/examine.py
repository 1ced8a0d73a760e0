"""Runs a script under watch, and examines its loaders."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.command_line.cli import option
from common.foreign_script import start
from common.foreign_script.failure import why_failed
from common.foreign_script.run import Outcome, injected, run
from common.machine import usable_cores
from dataloading.doctor.causes import Cause, find
from dataloading.doctor.hangs import Patience, explain
from dataloading.doctor.measured import Loader, read
from dataloading.doctor.report import report
from dataloading.doctor.watch.events import DIRECTORY_VARIABLE

WATCH = Path(__file__).parent / "watch" / "__init__.py"
LONGEST_S = 3600.0  # for a script without loaders


@dataclass(frozen=True)
class DoctorConfig:
    """Settings of ``dataloading.doctor``."""

    seconds: float = option(
        30.0, "the run is ended so long after its first batch, if it has not ended by itself", above=0
    )
    timeout: float = option(60.0, "seconds without a batch after which a loader counts as hanging", above=0)
    trials: float = option(60.0, "seconds in which other settings of a loader are tried; 0 for none", minimum=0)
    device: str = option(
        "auto",
        "the devices that the script finds: auto takes a GPU, or a stand-in if there is none",
        choices=start.DEVICES,
    )
    start: str = option("auto", "who starts the script: torchrun, with one rank, or python", choices=start.STARTS)


@dataclass(frozen=True)
class Examined:
    """The result of a run.

    :param failed: why the run could not be examined whole; empty if it could
    :param hangs: whether a loader gave no batch any more
    """

    loaders: list[Loader]
    causes: dict[str, list[Cause]]
    failed: str
    hangs: bool


def examine(config: DoctorConfig, script: Sequence[str], say: Callable[[str], object]) -> Examined:
    """Run a script and report on each loader.

    :param say: gets each line of the report
    """
    with tempfile.TemporaryDirectory(prefix="loader-doctor-") as name:
        patience = Patience(Path(name), config.seconds, config.timeout)
        outcome = run_watched(*launch(config, script), patience)
        loaders = read(Path(name))
    causes = {loader.line: find(loader, usable_cores()) for loader in loaders}
    for loader in loaders:
        for line in report(loader, causes[loader.line]):
            say(line)
    if patience.hangs:
        for line in explain(loaders, outcome.stacks, patience):
            say(line)
    failed = why_failed(outcome) if outcome.status else ""
    if not (loaders or failed or patience.hangs):
        failed = "no DataLoader was iterated over: the script makes its batches in another way, or starts Python without the watch"
    return Examined(loaders, causes, failed, patience.hangs)


def launch(config: DoctorConfig, script: Sequence[str]) -> tuple[list[str], dict[str, str], list[Path]]:
    """The arguments of Python, the environment, and what must be loaded in each process for it to run."""
    device = start.device_for(config.device, 1)
    by_torchrun = config.start == "torchrun" or (config.start == "auto" and start.wants_torchrun(script))
    environment = start.environment_for(device, 1, script)
    if not by_torchrun and "OMP_NUM_THREADS" not in os.environ:
        del environment["OMP_NUM_THREADS"]  # without torchrun, nobody sets it
    command = start.command(script, 1, "torchrun" if by_torchrun else "python")
    return command, environment, [start.STAND_IN] if device == "stand-in" else []


def run_watched(
    command: Sequence[str], environment: Mapping[str, str], watches: Sequence[Path], patience: Patience
) -> Outcome:
    """Run a script under watch until the patience is over.

    :param watches: other packages to load in each process
    """
    watched = {**injected(*watches, WATCH), DIRECTORY_VARIABLE: os.fspath(patience.directory)}
    return run(command, {**environment, **watched}, LONGEST_S, patience.directory, None, patience.is_over)
