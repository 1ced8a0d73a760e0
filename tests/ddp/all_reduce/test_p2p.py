"""ddp/all_reduce/p2p.py: messages reach the right rank, and all survivors name the rank that was lost first."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable

import pytest
import torch

from common.distributed.process_group import process_group
from common.resilience.suspicions import RankLost
from ddp.all_reduce.p2p import P2P
from tests.support.launch import free_port, run_ranks, run_with_victim


def talk() -> tuple[list[str], float, list[list[float]]]:
    """The messages that each rank received from the one before it: among all ranks, and among three."""
    with process_group(timeout_s=50) as env:
        all_ranks = P2P()
        received = []
        three = all_ranks.among([3, 0, 2]) if env.rank != 1 else all_ranks.among([1])
        assert [3, 0, 2][three.rank] == env.rank if env.rank != 1 else three.rank == 0
        for p2p in (all_ranks, three):
            following, preceding = (p2p.rank + 1) % p2p.size, (p2p.rank - 1) % p2p.size
            incoming = torch.zeros(2)
            if p2p.size > 1:
                p2p.exchange(torch.full((2,), float(env.rank)), following, incoming, preceding)
                p2p.exchange(torch.empty(0), following, torch.empty(0), preceding)
            received.append(incoming.tolist())
        if env.rank == 0:
            all_ranks.send(torch.arange(6).view(2, 3), 3)
        elif env.rank == 3:
            whole = torch.zeros(2, 3, dtype=torch.int64)
            all_ranks.receive(whole, 0)
            assert whole.flatten().tolist() == list(range(6))
        return all_ranks.hosts, all_ranks.timeout_s, received


def test_messages_reach_the_rank_that_they_are_for() -> None:
    hosts, timeouts, received = zip(*run_ranks(talk, 4), strict=True)
    assert hosts == ([socket.gethostname()] * 4,) * 4
    assert timeouts == (50,) * 4
    assert [everywhere for everywhere, _ in received] == [[3, 3], [0, 0], [1, 1], [2, 2]]
    assert [among for _, among in received] == [[3, 3], [0, 0], [0, 0], [2, 2]]


def pass_on_until_lost(victim: int, hurt: Callable[[], None], store_port: int | None) -> str:
    """A ring of messages, which the victim leaves; returns what this rank says of the lost one."""
    if store_port is not None:  # rank 0 holds the store, as without torchrun's agent
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        os.environ["MASTER_PORT"] = str(store_port)
    with process_group(timeout_s=600) as env:
        p2p = P2P()
        token = torch.zeros(1)
        try:
            for step in range(1_000_000):
                if env.rank == victim and step == 10:
                    hurt()
                p2p.exchange(token.clone(), (p2p.rank + 1) % p2p.size, token, (p2p.rank - 1) % p2p.size)
        except RankLost as lost:
            return str(lost)
        raise AssertionError("no rank was lost")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang_up() -> None:
    """Close all connections, as a host does that goes down; this process does not end."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as line:  # if it is a socket
            if line.family in (socket.AF_INET, socket.AF_INET6) and line.getpeername():  # and connected
                line.shutdown(socket.SHUT_RDWR)
    time.sleep(600)


@pytest.mark.faults
def test_a_rank_whose_connections_close_is_named_also_by_ranks_without_a_connection_to_it() -> None:
    survivors = run_with_victim(pass_on_until_lost, 4, 0, hang_up, None)
    for message in survivors.values():
        assert message.startswith("rank 0 (pid ")
        assert message.endswith(f" on {socket.gethostname()}) closed its connection during an all-reduce")


@pytest.mark.faults
def test_a_lost_rank_that_held_the_store_is_named_by_all() -> None:
    survivors = run_with_victim(pass_on_until_lost, 4, 0, die, free_port())
    assert [message.partition(" (")[0] for message in survivors.values()] == ["rank 0"] * 3
