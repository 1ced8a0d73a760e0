"""ddp/all_reduce/p2p.py: messages reach the right rank."""

from __future__ import annotations

import socket

import torch

from ddp.all_reduce.p2p import P2P
from ddp.rendezvous.process_group import process_group
from tests.support.launch import run_ranks


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
