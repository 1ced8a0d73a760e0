"""What loaders die of, in words."""

from __future__ import annotations

import errno

import pytest

from common.cli import UsageError
from dataloading.failures import explained


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RuntimeError("DataLoader worker (pid 42) is killed by signal: Killed. "),
            "loader worker (pid 42) was killed: the kernel does this when memory runs out",
        ),
        (
            RuntimeError("DataLoader worker (pid 42) is killed by signal: Bus error. It is possible that ..."),
            "loader worker (pid 42) was killed: shared memory ran out",
        ),
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
    with pytest.raises(UsageError) as explanation, explained():
        raise error
    assert str(explanation.value).startswith(words)
    assert explanation.value.__cause__ is error


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match=r"^something else$"), explained():
        raise RuntimeError("something else")
    with pytest.raises(UsageError, match=r"^mine$"), explained():
        raise UsageError("mine")
