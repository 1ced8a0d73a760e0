"""All-reduce by recursive halving and doubling: as few bytes as a ring, in a number of steps that grows with log W."""

from __future__ import annotations

from torch import Tensor

from ddp.all_reduce.p2p import P2P, SendReceiveAllReduce


class HalvingDoubling(SendReceiveAllReduce):
    """Ranks pair up: each gives its partner one half of the tensor, and adds what it gets to the half that it keeps.

    Recursive halving, a reduce-scatter: each rank repeats this with another partner for the half that it kept, until it
    keeps one part in W, which is the sum. Recursive doubling, an all-gather: the same partners in reverse order exchange their
    sums.

    If W is no power of two, r ranks are too many. The first r even ranks give their tensors to the odd ranks beside them,
    which take part for both and send back the sums at the end.

    2 log2(W) steps. Every rank sends 2n(W-1)/W bytes. Time: 2 log2(W) alpha + 2(W-1)/W beta n. If the number of ranks is no
    power of two, W is the largest one below it here, and 2(alpha + beta n) are added. (Rabenseifner, Optimization of collective
    reduction operations, 2004; Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in
    MPICH, 2005.)
    """

    def __init__(self, p2p: P2P) -> None:
        super().__init__(p2p)
        surplus = p2p.size - (1 << (p2p.size.bit_length() - 1))
        paired = range(2 * surplus)
        self._neighbour = p2p.rank ^ 1 if p2p.rank in paired else None
        participants = [*paired[1::2], *range(2 * surplus, p2p.size)]
        self._participants = p2p.among(participants) if p2p.rank in participants else None

    def _sum(self, buffer: Tensor) -> None:
        if self._participants is None:
            assert self._neighbour is not None
            self._p2p.send(buffer, self._neighbour)
            self._p2p.receive(buffer, self._neighbour)
            return
        if self._neighbour is not None:
            self._receive_and_add(buffer, self._neighbour)
        self._halve_and_double(buffer, self._participants)
        if self._neighbour is not None:
            self._p2p.send(buffer, self._neighbour)

    def _halve_and_double(self, part: Tensor, p2p: P2P) -> None:
        """For a number of ranks that is a power of two."""
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
