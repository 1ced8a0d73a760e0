"""All-reduce in a ring: the fewest bytes, and no rank that the others wait for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddp.all_reduce.in_thread import ShardedInThread
from ddp.all_reduce.p2p import SendReceiveAllReduce


class Ring(SendReceiveAllReduce, ShardedInThread):
    """The tensor is cut into W chunks. Every rank sends to the next rank only, while it receives from the one before.

    Reduce-scatter: in p-1 steps, each chunk travels once around the ring, and every rank on the way adds its own part. At
    the end of its way, the chunk is the sum. All-gather: in p-1 steps, each sum travels around once more. All chunks travel
    at once, so that every link is busy in every step.

    2(W-1) steps of n/W bytes. Every rank sends 2n(W-1)/W bytes: less than 2n however many ranks there are, and the least
    possible. Time: 2(W-1) alpha + 2(W-1)/W beta n. (Patarasu and Yuan, Bandwidth optimal all-reduce algorithms for clusters
    of workstations, 2009.)
    """

    def _sum(self, buffer: Tensor) -> None:
        chunks = buffer.tensor_split(self._p2p.size)
        self._reduce_scatter_chunks(chunks)
        self._all_gather_chunks(chunks)

    def reduce_scatter(self, buffer: Tensor) -> None:
        self._reduce_scatter_chunks(self._shards(buffer))

    def all_gather(self, buffer: Tensor) -> None:
        self._all_gather_chunks(self._shards(buffer))

    def _shards(self, buffer: Tensor) -> list[Tensor]:
        """The shards, in such an order that this rank's own is the chunk that it has at the end of a reduce-scatter."""
        shards = buffer.chunk(self._p2p.size)
        return [shards[-1], *shards[:-1]]

    def _reduce_scatter_chunks(self, chunks: Sequence[Tensor]) -> None:
        """Reduce-scatter: at the end, this rank holds the sum of chunk rank + 1."""
        rank, size = self._p2p.rank, self._p2p.size
        following, preceding = (rank + 1) % size, (rank - 1) % size
        for step in range(size - 1):
            outgoing, own = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
            incoming = self._scratch(own)
            self._p2p.exchange(outgoing, following, incoming, preceding)
            own += incoming

    def _all_gather_chunks(self, chunks: Sequence[Tensor]) -> None:
        """All-gather: at first, this rank holds chunk rank + 1."""
        rank, size = self._p2p.rank, self._p2p.size
        following, preceding = (rank + 1) % size, (rank - 1) % size
        for step in range(size - 1):
            outgoing, incoming = chunks[(rank + 1 - step) % size], chunks[(rank - step) % size]
            self._p2p.exchange(outgoing, following, incoming, preceding)
