"""ddp/rendezvous/fork_safety.py: a fork waits for C++ threads, and for no others."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ddp.rendezvous import fork_safety as forking
from ddp.rendezvous.process_group import process_group
from tests.support.launch import run_ranks


@pytest.fixture
def computing() -> Iterator[int]:
    """The native id of a thread that computes without the GIL."""
    over = threading.Event()
    data = bytes(1 << 24)

    def compute() -> None:
        while not over.is_set():
            hashlib.sha256(data)

    thread = threading.Thread(target=compute)
    thread.start()
    assert thread.native_id is not None
    try:
        yield thread.native_id
    finally:
        over.set()
        thread.join()


def seen_running(native_id: int, but: set[int | None]) -> bool:
    """Whether it is found within a while: between two blocks of its work it may wait for the GIL."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        if native_id in forking.running_threads(but):
            return True
    return False


def test_a_thread_at_work_is_running_unless_it_is_left_out(computing: int) -> None:
    assert seen_running(computing, set())
    assert not any(computing in forking.running_threads({computing}) for _ in range(50))


def forks() -> list[tuple[int, int]]:
    """Fork after collectives; for each, the status of the child, and how often it was waited for threads."""
    with (
        mock.patch.object(forking, "running_threads", wraps=forking.running_threads) as looked,
        process_group() as env,
    ):
        assert env.world_size == 2
        os.register_at_fork(before=forking.let_threads_rest)  # also where Python has no need of it
        children = []
        for _ in range(20):
            dist.all_reduce(torch.ones(1000))
            looked.reset_mock()
            pid = os.fork()
            if pid == 0:
                os._exit(7)
            children.append((os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), looked.call_count))
        return children


def test_every_fork_of_a_rank_looks_and_goes_on() -> None:
    """Each fork of a rank waits until threads of C++ hold no lock.

    Claim (ddp/resilience/README.md): a fork waits for threads of C++.
    """
    for children in run_ranks(forks, 2):
        assert {status for status, _ in children} == {7}
        assert min(times for _, times in children) >= 1
