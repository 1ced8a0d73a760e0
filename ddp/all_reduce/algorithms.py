"""All-reduce by hand: every rank brings a tensor, every rank leaves with the sum.

AllReduce          what the hand-written DDP asks of an algorithm: memory for a bucket, and to sum it, now or in the background
Backend            torch's own: dist.all_reduce, by gloo or NCCL
Naive              rank 0 collects, adds and hands out
Ring               every rank talks to its neighbours only, and all links are busy all the time
HalvingDoubling    partners exchange halves, then quarters, ...: as few bytes as a ring, in fewer steps
Tree               sums go up a tree and come down again: few steps, but of whole tensors

The last four are made of sends and receives alone, for CPU tensors. With each, every element's sum is completed on one rank
and copied to the others, so that all ranks hold the same bits and take the same step.

Their times are those of the alpha-beta model: a message of m bytes takes alpha + beta m seconds, whatever else is sent, while
a rank sends one message and receives one at a time; to add takes none. The tensor has n bytes, the group p ranks.
"""

from __future__ import annotations

import abc
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import UsageError
from ddp.all_reduce.p2p import P2P


class Pending(Protocol):
    """An all-reduce that is under way."""

    def wait(self) -> Any:
        """Return when the tensor holds the sum. :raises RankLost: if a rank was lost on the way"""


class AllReduce(abc.ABC):
    """Sums tensors over the ranks of a group, in place, as ``dist.all_reduce`` does.

    All ranks call it in the same order with tensors of the same size and dtype: 1-d and contiguous.
    """

    def __init__(self) -> None:
        # One thread, so that what was started first runs first, on every rank: torch's process groups do the same.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="all-reduce")

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros ``[numel]`` for a buffer that will be summed again and again, where that is fastest."""
        return torch.zeros(numel, dtype=dtype, device=device)

    @abc.abstractmethod
    def run(self, buffer: Tensor) -> None:
        """Sum ``buffer`` over the ranks.

        :raises RankLost: naming the rank that was lost, when one ended or did not answer in time
        """

    def start(self, buffer: Tensor) -> Pending:
        """Begin to sum ``buffer``, after all that was started before."""
        return _InThread(self._thread.submit(self.run, buffer))

    def close(self) -> None:
        """Give back threads, connections and memory; those of :meth:`allocate` must not be used any more."""
        self._thread.shutdown()


class _InThread:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class Backend(AllReduce):
    """The process group's own all-reduce: over TCP with gloo, over NVLink or the network with NCCL."""

    def __init__(self, p2p: P2P) -> None:
        super().__init__()
        self._peers = p2p

    def run(self, buffer: Tensor) -> None:
        self.start(buffer).wait()

    def start(self, buffer: Tensor) -> Pending:
        return _InBackend(dist.all_reduce(buffer, group=self._peers.group, async_op=True), self._peers)


class _InBackend:
    def __init__(self, work: dist.Work | None, p2p: P2P) -> None:
        self._work, self._peers = work, p2p

    def wait(self) -> None:
        assert self._work is not None
        with self._peers.counting_on(None):
            self._work.wait()


class _BySendAndReceive(AllReduce):
    """What the algorithms share: the lines to the other ranks, and memory for what arrives."""

    def __init__(self, p2p: P2P) -> None:
        super().__init__()
        self._peers = p2p
        self._memory = torch.empty(0, dtype=torch.uint8)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """:raises UsageError: for another device than the CPU"""
        if device.type != "cpu":
            raise UsageError(f"an all-reduce by hand sums tensors of the CPU, not of {device}: use the backend's")
        return super().allocate(numel, dtype, device)

    def _scratch(self, like: Tensor) -> Tensor:
        """Memory for a tensor ``like`` this, the same in every call: a new one's page faults cost as much as its transfer."""
        if self._memory.numel() < like.nbytes:
            self._memory = torch.empty(like.nbytes, dtype=torch.uint8)
        return self._memory[: like.nbytes].view(like.dtype)

    def _receive_and_add(self, buffer: Tensor, source: int) -> None:
        incoming = self._scratch(buffer)
        self._peers.receive(incoming, source)
        buffer += incoming


class Naive(_BySendAndReceive):
    """Rank 0 receives every tensor in turn and adds it to its own, then sends the sum to every rank in turn.

    2(p-1) steps, one after another. Rank 0 sends (p-1)n bytes, the others n. Time: 2(p-1) (alpha + beta n).
    """

    def run(self, buffer: Tensor) -> None:
        rank, others = self._peers.rank, range(1, self._peers.size)
        if rank == 0:
            for other in others:
                self._receive_and_add(buffer, other)
            for other in others:
                self._peers.send(buffer, other)
        else:
            self._peers.send(buffer, 0)
            self._peers.receive(buffer, 0)


class Ring(_BySendAndReceive):
    """The tensor is cut into p chunks, and every rank sends to the next rank only, while it receives from the one before.

    Reduce-scatter: in p-1 steps, each chunk travels once around the ring, and every rank that it passes adds its own part;
    where it ends, it is the sum. All-gather: in p-1 steps, each sum travels around once more. All chunks travel at once, so
    that every link is busy in every step.

    2(p-1) steps of n/p bytes. Every rank sends 2n(p-1)/p bytes, less than 2n however many ranks there are, which is the
    least possible. Time: 2(p-1) alpha + 2(p-1)/p beta n. (Patarasu and Yuan, Bandwidth optimal all-reduce algorithms for
    clusters of workstations, 2009.)
    """

    def run(self, buffer: Tensor) -> None:
        rank, size = self._peers.rank, self._peers.size
        following, preceding = (rank + 1) % size, (rank - 1) % size
        chunks = buffer.tensor_split(size)
        for step in range(size - 1):
            outgoing, own = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
            incoming = self._scratch(own)
            self._peers.exchange(outgoing, following, incoming, preceding)
            own += incoming
        # Now chunk rank + 1 is the sum.
        for step in range(size - 1):
            outgoing, incoming = chunks[(rank + 1 - step) % size], chunks[(rank - step) % size]
            self._peers.exchange(outgoing, following, incoming, preceding)


class HalvingDoubling(_BySendAndReceive):
    """Ranks pair up: each gives its partner one half of the tensor and adds what it gets to the half that it keeps.

    Recursive halving, a reduce-scatter: then it does so with another partner for the half that it kept, and so on, until
    every rank keeps one p-th, which is the sum. Recursive doubling, an all-gather: the same partners in reverse order
    exchange what they have.

    If p is no power of two, r ranks are too many. The first r even ranks give their tensors to the odd ranks beside them,
    which take part for both, and get the sums from them at the end.

    2 log2(p) steps. Every rank sends 2n(p-1)/p bytes. Time: 2 log2(p) alpha + 2(p-1)/p beta n; with p the largest power of two
    below, and 2(alpha + beta n) more, if the number of ranks is none. (Rabenseifner, Optimization of collective reduction
    operations, 2004; Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005.)
    """

    def __init__(self, p2p: P2P) -> None:
        super().__init__(p2p)
        surplus = p2p.size - (1 << (p2p.size.bit_length() - 1))
        paired = range(2 * surplus)
        self._neighbour = p2p.rank ^ 1 if p2p.rank in paired else None
        participants = [*paired[1::2], *range(2 * surplus, p2p.size)]
        self._participants = p2p.among(participants) if p2p.rank in participants else None

    def run(self, buffer: Tensor) -> None:
        if self._participants is None:
            assert self._neighbour is not None
            self._peers.send(buffer, self._neighbour)
            self._peers.receive(buffer, self._neighbour)
            return
        if self._neighbour is not None:
            self._receive_and_add(buffer, self._neighbour)
        self._halve_and_double(buffer, self._participants)
        if self._neighbour is not None:
            self._peers.send(buffer, self._neighbour)

    def _halve_and_double(self, part: Tensor, p2p: P2P) -> None:
        """For a power of two of ranks."""
        exchanged = []
        distance = p2p.size // 2
        while distance:
            partner = p2p.rank ^ distance
            lower, upper = part.tensor_split(2)
            kept, given = (lower, upper) if p2p.rank < partner else (upper, lower)
            incoming = self._scratch(kept)
            p2p.exchange(given, partner, incoming, partner)
            kept += incoming
            exchanged.append((partner, kept, given))
            part = kept
            distance //= 2
        for partner, kept, given in reversed(exchanged):
            p2p.exchange(kept, partner, given, partner)


class Tree(_BySendAndReceive):
    """Ranks stand in a binomial tree below rank 0. Each adds its children's tensors to its own and sends the sum to its
    parent; the whole sum comes down the same way.

    A rank's parent is the rank without its lowest bit: 6 (110) is a child of 4 (100), and 4 of 0.

    2⌈log2 p⌉ steps, whether p is a power of two or not, but of whole tensors. Rank 0 sends n⌈log2 p⌉ bytes, a leaf n.
    Time: 2⌈log2 p⌉ (alpha + beta n).
    """

    def __init__(self, p2p: P2P) -> None:
        super().__init__(p2p)
        lowest_bit = p2p.rank & -p2p.rank or p2p.size  # rank 0 has none, and a child at every distance
        self._parent = p2p.rank - lowest_bit
        distances = [1 << bit for bit in range(p2p.size.bit_length())]
        self._children = [p2p.rank + d for d in distances if d < lowest_bit and p2p.rank + d < p2p.size]

    def run(self, buffer: Tensor) -> None:
        for child in self._children:  # the nearest has the fewest below it, and is ready first
            self._receive_and_add(buffer, child)
        if self._peers.rank != 0:
            self._peers.send(buffer, self._parent)
            self._peers.receive(buffer, self._parent)
        for child in reversed(self._children):  # the farthest has the most below it, and must pass it on
            self._peers.send(buffer, child)
