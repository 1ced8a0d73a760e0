"""Which gradients travel together: tensors are divided into buckets of a limited size, in the order in which they become ready.

torch's own: ``compute_bucket_assignment_by_size`` in torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

MIB = 2**20
DEFAULT_LIMITS = [1 * MIB, 25 * MIB]  # bytes; the first bucket is small, so that communication begins early

AnyTensor = TypeVar("AnyTensor", bound=Tensor)
Kind = tuple[torch.dtype, torch.device]


def assign_buckets(tensors: Iterable[AnyTensor], limits: Sequence[int]) -> list[list[AnyTensor]]:
    """Divide tensors into buckets of one dtype and device each, in order.

    :param tensors: in the order in which they become ready
    :param limits: bytes at which a bucket is full: the first limit is for the first bucket of a dtype and device, and so on;
        the last limit is for all further buckets
    :returns: the buckets in the order in which they become full, then those that are not full
    """
    filling: dict[Kind, tuple[list[AnyTensor], int]] = {}
    full: Counter[Kind] = Counter()
    buckets = []
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        bucket, size = filling.pop(kind, ([], 0))
        filling[kind] = (bucket, size + tensor.nbytes)  # moved to the end: the remaining buckets stay in order
        bucket.append(tensor)
        if filling[kind][1] >= limits[min(full[kind], len(limits) - 1)]:
            buckets.append(filling.pop(kind)[0])
            full[kind] += 1
    return buckets + [bucket for bucket, _ in filling.values()]
