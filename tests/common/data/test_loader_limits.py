"""common/data/loader_limits.py: what a machine cannot hold is said before workers are started."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from common.data.loader_limits import (
    LONGEST_TEMPORARY_FOLDER,
    require_room_for_workers,
    require_short_temporary_folder,
)
from common.data.loaders import stock_loader
from common.errors import UsageError
from ddp.train import main
from tests.support.user_errors import UserError


def test_more_workers_than_memory_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2e9))
    require_room_for_workers(0)
    require_room_for_workers(50, ranks=3)
    message = r"^100 loader workers on each of 3 ranks take 3\.8 GB, and 2\.0 GB are free: use fewer \(--workers,"
    with pytest.raises(UsageError, match=message):
        require_room_for_workers(100, ranks=3)


def test_a_small_dev_shm_is_named_before_a_worker_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's loader would hang until the job's timeout."""
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


def test_a_command_says_so(tmp_path: Path, user_error: UserError, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2e9))
    small = ("--train-samples", "144", "--test-samples", "10", "--device", "cpu", "--run-dir", tmp_path / "run")
    assert "error: 5000 loader workers take 62.9 GB" in user_error(main, *small, "--workers", "5000")
