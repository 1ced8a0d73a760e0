"""All-reduce between hosts with several ranks each: in shared memory on each host, by rings between the hosts.

A ring of all ranks has a step for each of them, and sends through sockets what the ranks of a host could read in each
other's memory. Here only the sum of a host is sent, in as many steps as there are hosts.

    torchrun --nnodes=2 --nproc_per_node=8 ... -m ddp.train --strategy handwritten --all-reduce hierarchical
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddp.all_reduce.in_thread import InThread
from ddp.all_reduce.p2p import P2P
from ddp.all_reduce.ring import Ring
from ddp.all_reduce.shared_memory import SharedMemory


class Hierarchical(InThread):
    """Sums CPU tensors over ranks on any number of hosts; the same bits come out on all.

    The ranks of a host add up their buffers in shared memory, each one part. The ranks with the same part on each host then
    sum it in a ring of their own, and write the result to all ranks of their host. There are as many parts, and rings, as the
    smallest host has ranks. With one rank on each host this is a ring; with one host it is shared memory.

    For n bytes, h hosts and p ranks on each: 2 steps in shared memory, and 2(h-1) in which p rings share a host's network, as
    each sends n/(hp) bytes. Time: that of :class:`SharedMemory` for p ranks and, if alpha and beta are the network's,
    2(h-1) alpha + 2(h-1)/h beta n. A ring of all ranks needs 2(hp-1) such steps, and sends 2n(hp-1)/(hp) bytes out of each
    host instead of 2n(h-1)/h.

    :param p2p: the ranks over which tensors are summed
    :raises UsageError: on all ranks of a host that has not enough memory; outside Linux
    """

    def __init__(self, p2p: P2P) -> None:
        super().__init__()
        members: dict[str, list[int]] = {}
        for rank, host in enumerate(p2p.host_ids):
            members.setdefault(host, []).append(rank)
        neighbours = members[p2p.host_ids[p2p.rank]]
        index = neighbours.index(p2p.rank)
        rings = min(len(ranks) for ranks in members.values())
        self._ring = Ring(p2p.among([ranks[index] for ranks in members.values()])) if index < rings else None
        between = self._sum_between_hosts if len(members) > 1 else None
        self._local = SharedMemory(p2p.among(neighbours), parts=rings, between=between)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As :meth:`SharedMemory.allocate`."""
        return self._local.allocate(numel, dtype, device)

    def share(self, buffer: Tensor) -> bool:
        return self._local.share(buffer)

    def unshare(self, buffer: Tensor) -> None:
        self._local.unshare(buffer)

    def _sum(self, buffer: Tensor) -> None:
        self._local.run(buffer)

    def _sum_between_hosts(self, part: Tensor) -> None:
        assert self._ring is not None, "a rank that adds up a part is in a ring"
        self._ring.run(part)

    def close(self) -> None:
        super().close()
        self._local.close()
