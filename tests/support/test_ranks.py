"""tests/support/ranks.py: ranks that many functions use, and what one leaves behind for the next."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
from unittest import mock

import pytest
import torch

import ddp.train
from common.distributed.process_group import process_group
from tests.support.ranks import pool_pids, run_forked, run_ranks


def own_process() -> tuple[int, int]:
    with process_group(threads=1) as env:
        return os.getpid(), env.world_size


def test_jobs_of_several_sizes_use_the_same_processes() -> None:
    first, second, third = (run_ranks(own_process, world_size) for world_size in (2, 1, 3))
    assert [size for _, size in first + second + third] == [2, 2, 1, 3, 3, 3]
    pids = [pid for pid, _ in third]
    assert [pid for pid, _ in first + second] == [pids[0], pids[1], pids[0]]
    assert set(pids) <= pool_pids()
    assert not {pid for pid, _ in run_ranks(own_process, 2, fresh=True)} & pool_pids()


AFTER_A_WORKER_GROUP = """
import signal
from common.distributed.worker_group import _ctrl_c_afterwards
from tests.support.ranks import FORK_SERVER
with _ctrl_c_afterwards():  # which starts the fork server
    pass
with FORK_SERVER.Pool(1) as pool:
    print(pool.apply(signal.pthread_sigmask, (signal.SIG_BLOCK, ())))
"""


def test_sigint_reaches_processes_of_a_server_that_a_worker_group_has_started() -> None:
    """Which test starts the server depends on the order of the tests."""
    done = subprocess.run([sys.executable, "-c", AFTER_A_WORKER_GROUP], capture_output=True, text=True, timeout=120)
    assert done.stdout == "set()\n", done.stderr


Settings = tuple[str | None, str, list[str], torch.dtype, int, float, float, int, int]


def change_settings() -> Settings:
    """What this process has, before all of it is changed."""
    found = (
        os.environ.get("LEFT_BEHIND"), os.getcwd(), list(sys.argv), torch.get_default_dtype(), torch.get_num_threads(),
        torch.rand(()).item(), random.random(), logging.root.level, len(logging.root.handlers),
    )  # fmt: skip
    os.environ["LEFT_BEHIND"] = "yes"
    os.chdir("/")
    sys.argv[:] = ["left", "behind"]
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(found[4] + 1)
    logging.root.setLevel(logging.CRITICAL)
    logging.root.addHandler(logging.NullHandler())
    return found


def test_settings_are_reset() -> None:
    first, second = (run_ranks(change_settings, 1) for _ in range(2))
    assert first == second
    assert first[0][0] is None


def leave_a_handler() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def leave_a_patch() -> None:
    mock.patch.object(ddp.train, "evaluate").start()


def leave_a_group() -> None:
    torch.distributed.init_process_group("gloo")


@pytest.mark.parametrize(
    ("leave", "words"),
    [
        (leave_a_handler, "another handler of SIGUSR1"),
        (leave_a_patch, "another ddp.train.evaluate"),
        (leave_a_group, "a process group"),
    ],
)
def test_what_lasts_fails_the_test_and_the_next_has_new_ranks(leave: object, words: str) -> None:
    (before,) = run_ranks(own_process, 1)
    with pytest.raises(AssertionError, match=words):
        run_ranks(leave, 1)  # type: ignore[arg-type]
    assert not pool_pids()
    (after,) = run_ranks(own_process, 1)
    assert after != before


def end_at_once() -> None:
    os._exit(3)


def fail() -> None:
    raise ZeroDivisionError


def test_a_rank_that_fails_or_ends_is_told_and_replaced() -> None:
    for function, words in ((end_at_once, "ended without a result"), (fail, "ZeroDivisionError")):
        with pytest.raises(AssertionError, match=words):
            run_ranks(function, 2)
        assert len(run_ranks(own_process, 2)) == 2


def test_a_command_without_the_start_of_python() -> None:
    (done,) = run_forked("ddp.train", "--epochs", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--epochs 0" in done.stderr
