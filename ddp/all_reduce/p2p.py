"""Point-to-point messages between the ranks of a group, and the base of all-reduces that are made of them."""

from __future__ import annotations

import copy
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import UsageError
from ddp.all_reduce.in_thread import InThread


class P2P:
    """Sends CPU tensors to the ranks of a group and receives them. Ranks are counted within the group.

    To make one is a collective. Each object has a tag of its own, so that its messages are never taken for those of another
    object, or of the group's collectives in another thread. Its methods are for one thread at a time.

    ``hosts`` has the host name of each rank, ``host_ids`` what only the ranks of one host share, ``group`` is the whole group (also
    after :meth:`among`), ``members`` are the ranks' numbers in it, ``timeout_s`` is how long that waits for a rank, and ``sent_bytes``
    counts what this object has sent.

    :param group: the default group when None
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        group = group or dist.group.WORLD
        assert group is not None, "init_process_group comes first"
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout_s = group._get_backend(group._device_types[0]).options._timeout.total_seconds()
        self.group = group
        self.sent_bytes = 0
        introductions = [("", "", 0)] * self.size
        own = socket.gethostname(), host_id(), secrets.randbits(31)
        dist.all_gather_object(introductions, own, group)
        hosts, host_ids, tags = zip(*introductions, strict=True)
        self.hosts, self.host_ids, self._tag = list(hosts), list(host_ids), tags[0]
        self.members = list(range(self.size))

    def among(self, ranks: Sequence[int]) -> P2P:
        """The same for some ``ranks`` only, this one among them, renumbered in their order; no communication."""
        few = copy.copy(self)
        few.rank, few.size = list(ranks).index(self.rank), len(ranks)
        few.hosts = [self.hosts[rank] for rank in ranks]
        few.host_ids = [self.host_ids[rank] for rank in ranks]
        few.members = [self.members[rank] for rank in ranks]
        return few

    def send(self, tensor: Tensor, to: int) -> None:
        """Send ``tensor``, of any shape but contiguous; returns when it may be overwritten.

        :raises RuntimeError: when the other rank has ended, or does not answer in time
        """
        _wait(self._isend(tensor, to))

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill ``tensor`` with what ``source`` sends: as many elements, of the same dtype.

        :raises RuntimeError: when the other rank has ended, or does not answer in time
        """
        _wait(self._irecv(tensor, source))

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> None:
        """:meth:`send` and :meth:`receive` at once: two ranks that both sent first would wait for each other without end.

        :raises RuntimeError: when another rank has ended, or does not answer in time
        """
        receiving = self._irecv(incoming, source)
        sending = self._isend(outgoing, to)
        _wait(receiving)
        _wait(sending)

    def _isend(self, tensor: Tensor, to: int) -> dist.Work | None:
        if not tensor.numel():  # an empty tensor needs no message, as both sides know
            return None
        self.sent_bytes += tensor.nbytes
        return dist.isend(tensor, group=self.group, tag=self._tag, group_dst=self.members[to])

    def _irecv(self, tensor: Tensor, source: int) -> dist.Work | None:
        if not tensor.numel():
            return None
        return dist.irecv(tensor, group=self.group, tag=self._tag, group_src=self.members[source])


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def host_id() -> str:
    """An identifier that only the ranks of one host share.

    A host is where abstract sockets connect: a network namespace (as each container has) of one boot of one machine.
    """
    if sys.platform != "linux":
        return socket.gethostname()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/net').st_ino}"


class SendReceiveAllReduce(InThread):
    """Point-to-point messages to the other ranks, and memory for those that arrive. For CPU tensors.

    :param p2p: the ranks over which tensors are summed
    """

    def __init__(self, p2p: P2P) -> None:
        super().__init__()
        self._p2p = p2p
        self._memory = torch.empty(0, dtype=torch.uint8)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """:raises UsageError: for another device than the CPU"""
        require_cpu(device)
        return super().allocate(numel, dtype, device)

    def _scratch(self, like: Tensor) -> Tensor:
        """Memory for a tensor ``like`` this one, the same in every call: the page faults of new memory would cost as much as
        the transfer."""
        if self._memory.numel() < like.nbytes:
            self._memory = torch.empty(like.nbytes, dtype=torch.uint8)
        return self._memory[: like.nbytes].view(like.dtype)

    def _receive_and_add(self, buffer: Tensor, source: int) -> None:
        incoming = self._scratch(buffer)
        self._p2p.receive(incoming, source)
        buffer += incoming


def require_cpu(device: torch.device) -> None:
    """:raises UsageError: for another device than the CPU"""
    if device.type != "cpu":
        raise UsageError(f"an all-reduce by hand sums tensors of the CPU, not of {device}: use --all-reduce backend")
