"""Jobs that hang on purpose, for tests of who is named then."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from common.distributed.rank_logging import add_log_file, rank_logging
from common.signals.stop_request import StopRequest
from ddp.rendezvous.process_group import process_group
from ddp.watchdog import watchdog as watchdog_module
from ddp.watchdog.watchdog import Watchdog
from tests.support.launch import wait_until
from tests.support.ranks import forked

HANG_STEP = 5
GROUP_TIMEOUT_S = 600.0  # longer than any test: gloo must not report an error before the watchdog
UNSEEN = ("raise", "kill")  # what the others do not see, as on NCCL: they wait in C++ for what will never come


class Job(NamedTuple):
    """Ranks that sum a number in every step, and a folder of files: their logs; ``hanging``, with the process id of the victim;
    ``end``, whose presence ends the job."""

    folder: Path
    processes: list[ForkServerProcess]

    def wait_for(self, name: str, timeout_s: float = 200.0) -> Path:
        """A file that a rank leaves in the folder."""
        wait_until((self.folder / name).exists, timeout_s)
        return self.folder / name

    def exit_status(self, rank: int, timeout_s: float = 200.0) -> int | None:
        """The exit status of the rank; None if it did not end."""
        self.processes[rank].join(timeout_s)
        return self.processes[rank].exitcode

    def log(self, rank: int) -> str:
        """Everything that the rank logged."""
        return (self.folder / f"rank{rank}.log").read_text()


@contextlib.contextmanager
def hanging_job(
    folder: Path,
    environments: list[dict[str, str]],
    timeout_s: float,
    victim: int = -1,
    how: str = "",
    device: str = "cpu",
) -> Iterator[Job]:
    """A job in which rank ``victim`` does ``how`` (stop, loop, raise or kill) at data of step ``HANG_STEP``, or all do
    (deadlock); killed at the end."""
    folder.mkdir()
    with forked(environments, _rank, device, folder, timeout_s, victim, how) as processes:
        yield Job(folder, processes)


def _rank(device: str, folder: Path, timeout_s: float, victim: int, how: str) -> None:
    with (
        _patience(),
        process_group(device, timeout_s=GROUP_TIMEOUT_S, threads=1) as env,
        rank_logging(env),
        Watchdog(env, timeout_s) as watchdog,
        StopRequest().listening() as stop,
    ):
        add_log_file(env, folder)
        watchdog.stop_requested = stop.__bool__
        hangs = env.rank == victim or how == "deadlock"
        total, step = torch.zeros(1), HANG_STEP
        # The watchdog begins to count when every rank is where it will stay: the decision depends on no rank's speed.
        with watchdog.paused():
            watchdog.at(step, "data")
            if env.rank == max(victim, 0):
                _leave(folder / ("running" if victim < 0 else "hanging"), os.getpid())
            dist.barrier()
        if hangs and how != "deadlock":
            _hang(how)
        watchdog.at(step, "backward")
        if how in UNSEEN:
            _wait_inside_cpp(env.device)
        if how == "deadlock":
            dist.recv(total, src=1 - env.rank)
        while not total:  # for a victim, the others stay in the first all-reduce
            total.fill_((folder / "end").exists())
            dist.all_reduce(total)
            step += 1
            watchdog.at(step, "backward")
            time.sleep(0.01)


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Times for a machine that is busy with other work: a rank that lives sends a heartbeat within them."""
    with (
        mock.patch.object(watchdog_module, "LISTEN_S", 8.0),
        mock.patch.object(watchdog_module, "STORE_S", 8.0),
        mock.patch.object(watchdog_module, "READ_DECISION_S", 4.0),
    ):
        yield


def _hang(how: str) -> None:
    if how == "raise":
        raise ZeroDivisionError("on purpose")
    if how in ("stop", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
    elif how == "loop":
        while True:
            pass


def _wait_inside_cpp(device: torch.device) -> None:
    """For a GPU, or as if for one: neither a signal nor an error reaches the main thread, which holds no lock of Python's."""
    if device.type == "cuda":
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        total.item()
    mutex = ctypes.create_string_buffer(64)  # zeros are PTHREAD_MUTEX_INITIALIZER
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


def _leave(path: Path, pid: int) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(str(pid))
    draft.rename(path)  # whole, once it is there
