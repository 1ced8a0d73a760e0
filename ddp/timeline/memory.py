"""The memory of a sharded model's tensors on one rank, read from their storages.

Counted are whole parameters and gradients, shards of both, and the optimizer's state. Not counted are
activations, what a step of the optimizer needs for itself, and what the collectives copy (gloo's reduce-scatter copies what
it sends).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from ddp.sharded.flat import FlatParameters, in_backward

KINDS = ("optimizer state", "shards of parameters", "shards of gradients", "whole parameters", "whole gradients")


def count(flats: Iterable[FlatParameters], state: int) -> dict[str, float]:
    """Bytes by the names of :data:`KINDS`.

    At stages 1 and 2 the shard of the parameters lies in the whole ones, and at stage 1 the shard of the gradients in the whole
    ones: these bytes are counted once, as whole.

    :param state: bytes of the optimizer's state, which changes in its first step only
    """
    counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    counts["optimizer state"] = state
    for flat in flats:
        gradients = [] if flat.gradient is None else [flat.gradient]
        if in_backward():  # some are on their way into the flat one
            gradients += [parameter.grad for parameter in flat.whole if parameter.grad is not None]
        for kind, whole, shard in (("parameters", [flat.full], flat.shard), ("gradients", gradients, flat._grad_shard)):
            counts[f"whole {kind}"] += bytes_of(whole)
            if shard is not None:
                counts[f"shards of {kind}"] += bytes_of([*whole, shard]) - bytes_of(whole)
    return dict(counts)


def state_of(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state."""
    values = (value for entry in optimizer.state.values() for value in entry.values())
    return bytes_of(value for value in values if isinstance(value, Tensor))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each counted once. A ``DTensor`` counts by this rank's shard."""
    storages = (getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
