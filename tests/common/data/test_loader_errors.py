"""What loaders die of, in words."""

from __future__ import annotations

import errno
import os
import signal
from multiprocessing.resource_sharer import DupFd
from pathlib import Path

import pytest

from common.data.loader_errors import loader_errors
from common.errors import UsageError
from dataloading.loader.stock_loader import stock_loader


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


class _Deadly:
    """A data set whose samples end the process that fetches them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)  # DataLoader's handler would report it too
        os.kill(os.getpid(), signal.SIGBUS)
        return index


def test_the_signal_that_ended_a_worker_is_explained() -> None:
    with pytest.raises(UsageError, match="was killed: shared memory ran out"), loader_errors():
        list(stock_loader(_Deadly(), 1))


def test_a_worker_that_dies_while_it_hands_over_is_explained(tmp_path: Path) -> None:
    batch = DupFd(0)
    batch._id = (str(tmp_path / "its-socket"), 1)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="a loader worker was killed while it handed over a batch"), loader_errors():
        batch.detach()


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match=r"^something else$"), loader_errors():
        raise RuntimeError("something else")
    with pytest.raises(UsageError, match=r"^mine$"), loader_errors():
        raise UsageError("mine")
