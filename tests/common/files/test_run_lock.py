"""common/files/run_directory.py: a directory belongs to one process, for as long as that lives."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from common.errors import UsageError
from common.files.run_directory import LOCK_FILE, lock_run
from tests.support.launch import FORK_SERVER, kill, kill_tree


def _hold(folder: Path, pipe: Connection) -> None:
    """Hold the lock, beside a forked child that inherits all descriptors; until the pipe says otherwise."""
    with lock_run(folder):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
        pipe.send(child.pid)
        pipe.recv()
    pipe.send(None)
    pipe.recv()


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[tuple[BaseProcess, psutil.Process, Connection]]:
    """Another process that holds the lock, and its child."""
    ours, theirs = FORK_SERVER.Pipe()
    process = FORK_SERVER.Process(target=_hold, args=(folder, theirs))
    process.start()
    theirs.close()
    assert ours.poll(60)
    child = psutil.Process(ours.recv())
    try:
        yield process, child, ours
    finally:
        kill_tree(child.pid)  # which its parent may have left behind
        kill([process])
        ours.close()


def test_a_second_process_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("process 99999999 on a host with a long name, which held it before\n")
    with holding(tmp_path) as (process, _, pipe):
        for _ in range(2):  # who is refused takes nothing from the holder
            with pytest.raises(
                UsageError, match=rf"--run-dir {tmp_path} is in use by process {process.pid} on [^,]+: "
            ):
                lock_run(tmp_path)
        pipe.send(None)
        assert pipe.poll(60)
        lock_run(tmp_path).close()  # it lives, but has closed it


def test_it_is_free_when_its_process_was_killed_though_a_child_lives_on(tmp_path: Path) -> None:
    with holding(tmp_path) as (process, child, _):
        process.kill()
        process.join()
        with lock_run(tmp_path):
            assert child.is_running()
            assert (tmp_path / LOCK_FILE).read_text().startswith(f"process {os.getpid()} on ")
