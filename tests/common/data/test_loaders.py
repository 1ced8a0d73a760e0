"""common/data/loaders.py: what a machine cannot hold, what loaders die of, and how their workers end."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import signal
import tempfile
from multiprocessing.resource_sharer import DupFd
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from common.data.loaders import (
    LONGEST_TEMPORARY_FOLDER,
    loader_errors,
    require_room_for_workers,
    require_short_temporary_folder,
    stock_loader,
)
from common.errors import UsageError
from tests.support.launch import run_program


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RuntimeError("DataLoader worker (pid(s) 42, 43) exited unexpectedly"),
            "loader worker (pid 42, 43) was killed: most often, the kernel does this",
        ),
        (OSError(errno.EMFILE, "Too many open files"), "too many open files: "),
        (RuntimeError("unable to open shared memory object </torch_1_2_3> in read-write mode: Too many open files (24)"),
         "too many open files: "),
        (
            RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"),
            "shared memory (/dev/shm) is full: ",
        ),
    ],
)  # fmt: skip
def test_a_death_says_what_to_do(error: Exception, words: str) -> None:
    with pytest.raises(UsageError) as explanation, loader_errors():
        raise error
    assert str(explanation.value).startswith(words)
    assert explanation.value.__cause__ is error


@dataclasses.dataclass
class _Deadly:
    """A data set whose samples end the process that fetches them."""

    by: int  # a signal, or less an exit status

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if self.by <= 0:
            os._exit(-self.by)
        signal.signal(self.by, signal.SIG_DFL)  # DataLoader's handler would report it too
        os.kill(os.getpid(), self.by)
        return index


@pytest.mark.parametrize(
    ("by", "words"),
    [
        (signal.SIGBUS, "was killed: shared memory ran out"),
        (signal.SIGABRT, "was killed: by signal 6"),
        (-3, r"ended with status 3: something in it calls sys\.exit\(\)"),
    ],
)
def test_how_a_worker_ended_is_explained(by: int, words: str) -> None:
    with pytest.raises(UsageError, match=words), loader_errors():
        list(stock_loader(_Deadly(by), 1))


def test_a_worker_that_dies_while_it_hands_over_is_explained(tmp_path: Path) -> None:
    batch = DupFd(0)
    batch._id = (str(tmp_path / "its-socket"), 1)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="a loader worker ended before it had handed over a batch"), loader_errors():
        batch.detach()


@pytest.mark.parametrize(
    "own",
    [
        RuntimeError(
            'Original Traceback:\n  File "/home/me/torch_faces/data.py", line 7\nRuntimeError: label 7 is out of range'
        ),
        RuntimeError("shared memory of my own is odd"),
        RuntimeError("something else"),
        UsageError("mine"),
        OSError(errno.ENOSPC, "No space left on device", "cache/7.npy"),
    ],
)
def test_an_error_of_the_user_s_own_code_stays_what_it_is(own: Exception) -> None:
    with pytest.raises(type(own), match=re.escape(str(own))), loader_errors():
        raise own


def test_more_workers_than_memory_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """More workers than memory are refused with both numbers.

    Claim (ddp/resilience/README.md): workers that the machine cannot hold are refused.
    """
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2e9))
    require_room_for_workers(0)
    require_room_for_workers(50, ranks=3)
    message = r"^100 loader workers on each of 3 ranks take 3\.8 GB, and 2\.0 GB are free: use fewer \(--workers,"
    with pytest.raises(UsageError, match=message):
        require_room_for_workers(100, ranks=3)


def test_a_small_dev_shm_is_named_before_a_worker_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ``/dev/shm`` that is too small is named before a worker is started.

    torch's loader would hang until the job's timeout.

    Claim (ddp/resilience/README.md): workers that the machine cannot hold are refused.
    """
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096))
    stock_loader([1], 0, batch_bytes=10**9)
    stock_loader([1], 2, batch_bytes=1024)
    with pytest.raises(
        UsageError, match=r"^shared memory \(/dev/shm\) is full: its batches need 0\.2 MB and 0\.0 MB are"
    ):
        stock_loader([1], 2, batch_bytes=1 << 14, ranks=3)


def test_a_temporary_folder_that_is_too_long_for_sockets_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch's workers would report it on stderr, and never hand over a batch."""
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * (LONGEST_TEMPORARY_FOLDER - 1))
    require_short_temporary_folder()
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * LONGEST_TEMPORARY_FOLDER)
    stock_loader([1], 0)
    with pytest.raises(
        UsageError, match=r"^TMPDIR /x+ is too long for the sockets of loader workers: use one of at most 75"
    ):
        stock_loader([1], 1)


ONE_DIES = """
import os, signal
from torch.utils.data import DataLoader
from common.data.loaders import poll_for_deaths, start_worker

poll_for_deaths()
batches = iter(DataLoader(range(100_000), 1, num_workers=2, worker_init_fn=start_worker))
next(batches)
assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, "DataLoader set its handler"
os.kill(batches._workers[0].pid, signal.SIGKILL)
batches._workers[0].join()  # one that is not quite dead yet as it hands over a batch is another error
try:
    for _ in batches:
        pass
except RuntimeError as error:
    print(error)
del batches
print("closed")
"""


def test_a_dead_worker_is_found_without_a_signal_handler() -> None:
    done = run_program(ONE_DIES)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first.startswith("DataLoader worker (pid(s)") and "exited unexpectedly" in first
    assert last == "closed"
