"""ddp/all_reduce/hierarchical.py: it finds out which ranks share a host, and sums over any groups. (Its sums: test_algorithms.py.)"""

from __future__ import annotations

from unittest import mock

import torch

from ddp.all_reduce.hierarchical import Hierarchical
from ddp.all_reduce.p2p import P2P
from ddp.rendezvous.process_group import process_group
from tests.support.launch import run_ranks


def summed_where_they_are() -> None:
    with process_group(timeout_s=250) as env:
        for pretended in (False, True):
            name = f"node-{env.rank % 2}" if pretended else "node"
            with mock.patch("socket.gethostname", return_value=name):
                all_reduce = Hierarchical(P2P())
                ones = all_reduce.allocate(100_000, torch.float32, torch.device("cpu")).fill_(1)
                all_reduce.run(ones)
                assert (ones == env.world_size).all()
                all_reduce.close()


def test_it_determines_the_host_of_each_rank() -> None:
    """It finds out which ranks share a host, and sums.

    Claim (ddp/all_reduce/README.md): hierarchical gives the sum, whichever ranks share a host.
    """
    run_ranks(summed_where_they_are, 3)
