"""Runs of ``ddp.train`` that a test interrupts: stops, kills, or lets hang."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from common.distributed.worker_group import rendezvous, take_environment
from common.training.metrics import read_metrics
from ddp.checkpoint import storage
from ddp.train import main
from tests.ddp.jobs import without_figures
from tests.support.launch import FORK_SERVER, kill

# 60 steps, each with a record; dropout and BatchNorm, so that a rank has something of its own to lose.
FLAGS = (
    "--train-samples", "720", "--test-samples", "200", "--batch-size", "24", "--epochs", "2", "--log-every", "1",
    "--device", "cpu", "--threads", "1",
)  # fmt: skip
STEPS_PER_EPOCH, STEPS = 30, 60

Plant = Callable[[], None]


class Run:
    """The ranks of a job that trains in ``folder``; without torchrun, whose start takes many times as long."""

    def __init__(
        self, folder: Path, flags: tuple[str, ...], environments: list[dict[str, str]], plant: Plant | None
    ) -> None:
        self.folder = folder
        self.output = folder.with_suffix(".output")
        command = ["ddp.train", *FLAGS, "--run-dir", str(folder), *flags]
        self.processes = [
            FORK_SERVER.Process(target=_rank, args=({**os.environ, **environment}, command, self.output, plant))
            for environment in environments
        ]
        for process in self.processes:
            process.start()

    def wait_for_step(self, step: int, timeout_s: float = 90.0) -> int:
        """Wait until so many steps are done; returns how many are."""
        wait_for_step(self.folder, step, timeout_s)
        return steps_done(self.folder)

    def send(self, rank: int, number: int) -> None:
        """A signal to one rank."""
        os.kill(self.processes[rank].pid or 0, number)

    def exit_statuses(self, timeout_s: float = 90.0) -> list[int | None]:
        """What each rank ended with; None if it did not in time."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def log(self, rank: int) -> str:
        """All that the rank logged."""
        return (self.folder / "logs" / f"rank{rank}.log").read_text()

    def finish(self, timeout_s: float = 90.0) -> None:
        """Wait until the run is complete."""
        statuses = self.exit_statuses(timeout_s)
        assert set(statuses) == {0}, f"{statuses}\n{self.output.read_text()}"


@contextlib.contextmanager
def training(folder: Path, *flags: str, world_size: int = 2, plant: Plant | None = None) -> Iterator[Run]:
    """``python -m ddp.train FLAGS`` on every rank of a new job; all that is left of it is killed at the end of the block.

    :param world_size: 0 for the one process of no job
    :param plant: importable by name; called on every rank before it trains, to let something go wrong
    """
    with contextlib.ExitStack() as stack:
        environments = stack.enter_context(rendezvous(world_size)) if world_size else [{}]
        run = Run(folder, flags, environments, plant)
        try:
            yield run
        finally:
            kill(run.processes)


def wait_for_step(folder: Path, step: int, timeout_s: float = 90.0) -> None:
    """Wait until the run in ``folder`` has done so many steps."""
    deadline = time.monotonic() + timeout_s
    while steps_done(folder) < step:
        assert time.monotonic() < deadline, f"{steps_done(folder)} steps after {timeout_s} s, not {step}"
        time.sleep(0.02)


def steps_done(folder: Path) -> int:
    """How many steps the run has recorded."""
    return max((record["step"] for record in read_metrics(folder)), default=0)


def newest_step(folder: Path) -> int:
    """The step of the run's newest checkpoint, of which every byte is checked; 0 if there is none."""
    found = storage.newest(folder)
    return found[1].step if found else 0


def litter(folder: Path) -> list[str]:
    """What no run should leave in its directory: half-written files, and damaged checkpoints."""
    return [path.name for pattern in (".*", "*.scratch", "damaged-*") for path in folder.rglob(pattern)]


def shared_memory() -> set[str]:
    """The segments in /dev/shm that belong to this user, but for those of other living processes, such as other tests'."""
    found = set()
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for entry in os.scandir("/dev/shm"):
        with contextlib.suppress(FileNotFoundError):  # another program's come and go
            owner = re.match(r"torch_(\d+)_", entry.name)
            of_another = owner is not None and int(owner[1]) not in ours and psutil.pid_exists(int(owner[1]))
            if entry.stat().st_uid == os.getuid() and not of_another:
                found.add(entry.name)
    return found


def shared_memory_left(before: set[str], settle_s: float = 5.0) -> set[str]:
    """What is there that was not before; another program's has time to go."""
    deadline = time.monotonic() + settle_s
    while (left := shared_memory() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def processes_of(folder: Path) -> list[psutil.Process]:
    """All processes that name the run's directory on their command line, or were forked from one that does."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(folder) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _rank(environment: dict[str, str], command: list[str], output: Path, plant: Plant | None) -> None:
    take_environment(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = command
    multiprocessing.set_start_method(
        "fork", force=True
    )  # of loader workers: as on a command line, not as we were started
    if plant is not None:
        plant()
    with without_figures():
        main()
