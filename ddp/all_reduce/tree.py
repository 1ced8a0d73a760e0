"""All-reduce along a tree: few steps for small tensors, but each of the whole tensor."""

from __future__ import annotations

from torch import Tensor

from ddp.all_reduce.p2p import P2P, SendReceiveAllReduce


class Tree(SendReceiveAllReduce):
    """The ranks form a binomial tree below rank 0. Each adds its children's tensors to its own and sends the sum to its
    parent; the whole sum comes down the same way.

    A rank's parent is the rank without its lowest bit: 6 (110) is a child of 4 (100), and 4 of 0.

    2⌈log2 W⌉ steps, whether W is a power of two or not, but of whole tensors. Rank 0 sends n⌈log2 W⌉ bytes, a leaf n.
    Time: 2⌈log2 W⌉ (alpha + beta n).
    """

    def __init__(self, p2p: P2P) -> None:
        super().__init__(p2p)
        lowest_bit = p2p.rank & -p2p.rank or p2p.size  # rank 0 has no such bit, and a child at every distance
        self._parent = p2p.rank - lowest_bit
        distances = [1 << bit for bit in range(p2p.size.bit_length())]
        self._children = [p2p.rank + d for d in distances if d < lowest_bit and p2p.rank + d < p2p.size]

    def _sum(self, buffer: Tensor) -> None:
        for child in self._children:  # the nearest has the smallest subtree, and is ready first
            self._receive_and_add(buffer, child)
        if self._p2p.rank != 0:
            self._p2p.send(buffer, self._parent)
            self._p2p.receive(buffer, self._parent)
        for child in reversed(self._children):  # the farthest has the largest subtree to pass the sum on to
            self._p2p.send(buffer, child)
