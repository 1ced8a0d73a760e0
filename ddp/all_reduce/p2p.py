"""Point-to-point messages between the ranks of a group, and the base of all-reduces that are made of them.

If a message does not arrive, all ranks name the rank that was lost.

Gloo's own errors name no rank, or the wrong one: when rank 0 ends, rank 1 gives up and leaves, and rank 2 sees the connection
of rank 1 close. So ranks report which rank they suspect (:mod:`common.resilience.suspicions`) and agree on the lost one.
"""

from __future__ import annotations

import contextlib
import copy
import os
import secrets
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import UsageError
from common.resilience.suspicions import RankLost, Suspicions
from ddp.all_reduce.base import AllReduce


class P2P:
    """Sends CPU tensors to the ranks of a group and receives them. Ranks are counted within the group.

    To make one is a collective. Each object has a tag of its own, so that its messages are never taken for those of another
    object, or of the group's collectives in another thread. Its methods are for one thread at a time.

    ``hosts`` has the host name of each rank, ``host_ids`` what only the ranks of one host share, ``group`` is the whole group (also
    after :meth:`among`), ``timeout_s`` is how long that waits for a rank, and ``sent_bytes`` counts what this object has sent.

    :param group: the default group when None
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        group = group or dist.group.WORLD
        assert group is not None, "init_process_group comes first"
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout_s = group._get_backend(group._device_types[0]).options._timeout.total_seconds()
        self.group = group
        self.sent_bytes = 0
        introductions = [("", "", 0, 0)] * self.size
        own = socket.gethostname(), host_id(), os.getpid(), secrets.randbits(31)
        dist.all_gather_object(introductions, own, group)
        hosts, host_ids, pids, tags = zip(*introductions, strict=True)
        self.hosts, self.host_ids, self._tag = list(hosts), list(host_ids), tags[0]
        self._members = list(range(self.size))  # in the group
        processes = list(zip(hosts, pids, strict=True))
        self._suspicions = Suspicions(f"rank-lost/{self._tag}", self.rank, processes, self.timeout_s)

    def among(self, ranks: Sequence[int]) -> P2P:
        """The same for some ``ranks`` only, this one among them, renumbered in their order; no communication.

        :class:`RankLost` still names ranks as the group counts them.
        """
        few = copy.copy(self)
        few.rank, few.size = list(ranks).index(self.rank), len(ranks)
        few.hosts = [self.hosts[rank] for rank in ranks]
        few.host_ids = [self.host_ids[rank] for rank in ranks]
        few._members = [self._members[rank] for rank in ranks]
        return few

    def send(self, tensor: Tensor, to: int) -> None:
        """Send ``tensor``, of any shape but contiguous; returns when it may be overwritten.

        :raises RankLost: naming the rank that was lost
        """
        self._wait(self._isend(tensor, to), to)

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill ``tensor`` with what ``source`` sends: as many elements, of the same dtype.

        :raises RankLost: naming the rank that was lost
        """
        self._wait(self._irecv(tensor, source), source)

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> None:
        """:meth:`send` and :meth:`receive` at once: two ranks that both sent first would wait for each other without end.

        :raises RankLost: naming the rank that was lost
        """
        receiving = self._irecv(incoming, source)
        sending = self._isend(outgoing, to)
        self._wait(receiving, source)
        self._wait(sending, to)

    def _isend(self, tensor: Tensor, to: int) -> dist.Work | None:
        if not tensor.numel():  # an empty tensor needs no message, as both sides know
            return None
        self.sent_bytes += tensor.nbytes
        with self.blaming(to):
            return dist.isend(tensor, group=self.group, tag=self._tag, group_dst=self._members[to])

    def _irecv(self, tensor: Tensor, source: int) -> dist.Work | None:
        if not tensor.numel():
            return None
        with self.blaming(source):
            return dist.irecv(tensor, group=self.group, tag=self._tag, group_src=self._members[source])

    def _wait(self, work: dist.Work | None, suspect: int) -> None:
        if work is not None:
            with self.blaming(suspect):
                work.wait()

    @contextlib.contextmanager
    def blaming(self, suspect: int | None) -> Iterator[None]:
        """A block that needs ``suspect``, or all ranks if None: its ``RuntimeError`` becomes the :class:`RankLost` of
        :meth:`lost`.

        After a loss no block is entered any more, and the same error is raised again: ranks that gave up at different points
        would wait for each other.
        """
        self._suspicions.raise_if_lost()
        try:
            yield
        except RuntimeError as error:  # gloo raises no other
            raise self.lost(suspect, error) from error

    def lost(self, suspect: int | None, cause: Exception) -> RankLost:
        """The error to raise, the same on every rank: see :meth:`common.resilience.suspicions.Suspicions.report`.

        :param suspect: the rank that should have answered; None if it might be any
        :param cause: what this rank saw
        """
        return self._suspicions.report(None if suspect is None else self._members[suspect], cause)


def host_id() -> str:
    """An identifier that only the ranks of one host share.

    A host is where abstract sockets connect: a network namespace (as each container has) of one boot of one machine.
    """
    if sys.platform != "linux":
        return socket.gethostname()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/net').st_ino}"


class SendReceiveAllReduce(AllReduce):
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
