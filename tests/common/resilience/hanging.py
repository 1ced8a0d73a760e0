"""Jobs that hang on purpose, for tests of who is named then."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from common.distributed.process_group import process_group
from common.distributed.rank_logging import rank_logging
from common.resilience.watchdog import Watchdog
from tests.launch import FORK_SERVER, NO_GPUS, kill

HANG_STEP = 5
GROUP_TIMEOUT_S = 60.0  # gloo's own is for later


class Job:
    """Ranks that sum a number in every step, and a folder: of their logs, of ``hanging``, in which the victim leaves its
    process id, of ``worker`` with that of its loader worker, and of ``end``, whose presence ends the job."""

    def __init__(
        self, folder: Path, environments: list[dict[str, str]], timeout_s: float, victim: int, how: str
    ) -> None:
        self.folder = folder
        self.processes = [
            FORK_SERVER.Process(target=_rank, args=(environment | NO_GPUS, folder, timeout_s, victim, how))
            for environment in environments
        ]
        for process in self.processes:
            process.start()

    def wait_for(self, name: str, timeout_s: float = 60.0) -> Path:
        """A file that a rank leaves in the folder."""
        deadline = time.monotonic() + timeout_s
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, f"no {name} after {timeout_s} s"
            time.sleep(0.05)
        return self.folder / name

    def exit_status(self, rank: int, timeout_s: float = 60.0) -> int | None:
        """What the rank ended with; None if it did not."""
        self.processes[rank].join(timeout_s)
        return self.processes[rank].exitcode

    def log(self, rank: int) -> str:
        """All that the rank logged."""
        return (self.folder / f"rank{rank}.log").read_text()


@contextlib.contextmanager
def hanging_job(
    folder: Path, environments: list[dict[str, str]], timeout_s: float, victim: int = -1, how: str = ""
) -> Iterator[Job]:
    """A job in which rank ``victim`` does ``how`` (stop, loop or loader) at data of step ``HANG_STEP``, or all do
    (deadlock); killed at the end."""
    folder.mkdir()
    job = Job(folder, environments, timeout_s, victim, how)
    try:
        yield job
    finally:
        kill(job.processes)


def _rank(environment: dict[str, str], folder: Path, timeout_s: float, victim: int, how: str) -> None:
    os.environ.update(environment)
    with (
        process_group("cpu", timeout_s=GROUP_TIMEOUT_S, threads=1) as env,
        rank_logging(env, folder),
        Watchdog(env, timeout_s) as watchdog,
    ):
        end, step = torch.zeros(1), 0
        while not end:
            step += 1
            watchdog.at(step, "data")
            if step == HANG_STEP:
                if env.rank == victim:
                    _leave(folder / "hanging", os.getpid())
                    _hang(how, folder)
                elif victim < 0 and env.is_main:
                    _leave(folder / "running", os.getpid())
            watchdog.at(step, "backward")
            end.fill_((folder / "end").exists())
            if how == "deadlock" and step == HANG_STEP:
                dist.recv(end, src=1 - env.rank)
            if env.world_size > 1:
                dist.all_reduce(end)
            watchdog.at(step, "optimizer")
            time.sleep(0.01)


def _hang(how: str, folder: Path) -> None:
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "loop":
        while True:
            pass
    elif how == "loader":
        next(iter(DataLoader(_Stuck(folder), num_workers=1, multiprocessing_context="fork")))  # it starts at once


class _Stuck(Dataset[int]):
    """A disk that does not answer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        _leave(self._folder / "worker", os.getpid())
        time.sleep(1000)
        return index


def _leave(path: Path, pid: int) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(str(pid))
    draft.rename(path)  # whole, once it is there
