"""All-reduce through rank 0: the simplest algorithm, and the slowest."""

from __future__ import annotations

from torch import Tensor

from ddp.all_reduce.p2p import SendReceiveAllReduce


class Naive(SendReceiveAllReduce):
    """Rank 0 receives every tensor in turn and adds it to its own, then sends the sum to every rank in turn.

    2(W-1) steps, one after another. Rank 0 sends (W-1)n bytes, the others n. Time: 2(W-1) (alpha + beta n).
    """

    def _sum(self, buffer: Tensor) -> None:
        rank, others = self._p2p.rank, range(1, self._p2p.size)
        if rank == 0:
            for other in others:
                self._receive_and_add(buffer, other)
            for other in others:
                self._p2p.send(buffer, other)
        else:
            self._p2p.send(buffer, 0)
            self._p2p.receive(buffer, 0)
