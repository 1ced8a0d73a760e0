"""Where parameters lie in one flat tensor, of which every rank owns an equal shard.

    flat    |  w1       |  b1  | w2        | b2 | 0 0 |    the last shard is filled up with zeros
    shards  |   rank 0     |   rank 1     |  rank 2   |    a shard may begin and end inside a parameter

One collective gathers or reduces all of it, and all ranks send and receive equally much. Each parameter begins at a multiple of
64 bytes, as torch allocates them: matrix products of others differ in the last bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from ddp.by_hand.buckets import shaped

ALIGNMENT = 64  # bytes


class FlatLayout:
    """Where parameters lie in a flat tensor ``[ranks * shard_numel]``, and in this rank's shard of it.

    :param like: for each parameter, a tensor of its shape and strides, perhaps on the meta device
    :param itemsize: bytes per element of the flat tensor
    :param shard_itemsize: bytes per element of the shard that is optimized
    """

    def __init__(self, like: Sequence[Tensor], rank: int, ranks: int, itemsize: int, shard_itemsize: int) -> None:
        self.like = list(like)
        self._rank = rank
        aligned = [_round_up(one.numel(), ALIGNMENT // itemsize) for one in self.like]
        self._begins = list(itertools.accumulate(aligned, initial=0))[:-1]
        self._ends = [begin + one.numel() for begin, one in zip(self._begins, self.like, strict=True)]
        even = _round_up(self._ends[-1], ranks) // ranks
        # torch's fused optimizers work on vectors, and round the elements left over at a tensor's end in another way. So cut
        # between vectors, if that leaves something for the last rank.
        in_vectors = _round_up(even, ALIGNMENT // shard_itemsize)
        self.shard_numel = in_vectors if in_vectors * (ranks - 1) < self._ends[-1] else even
        self.numel = self.shard_numel * ranks
        following = [*self._begins[1:], self.numel]
        # Padding, as (begin, end): after each parameter, to the next.
        self.gaps = [(end, begin) for end, begin in zip(self._ends, following, strict=True) if end < begin]
        offset = rank * self.shard_numel
        # All begins, then all ends: relative to this rank's shard, and clamped to it.
        in_shard = [
            [min(max(at - offset, 0), self.shard_numel) for at in at_all] for at_all in (self._begins, self._ends)
        ]
        # Each parameter's (begin, end) in this rank's shard; both are equal if it has no elements there.
        self._own_bounds = list(zip(*in_shard, strict=True))

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's place in a flat tensor, in the parameter's shape."""
        places = zip(self._begins, self._ends, self.like, strict=True)
        return [shaped(flat[begin:end], like) for begin, end, like in places]

    def own(self, flat: Tensor) -> Tensor:
        """This rank's shard of a flat tensor: ``[shard_numel]``."""
        return flat[self._rank * self.shard_numel :][: self.shard_numel]

    def parts(self, shard: Tensor) -> list[Tensor]:
        """Each parameter's part of this rank's shard: 1-d, perhaps empty."""
        return [shard[begin:end] for begin, end in self._own_bounds]

    def begins(self) -> list[int]:
        """For each part of this rank's shard, the index in its parameter at which the part begins."""
        offset = self._rank * self.shard_numel
        return [min(max(offset, begin), end) - begin for begin, end in zip(self._begins, self._ends, strict=True)]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
