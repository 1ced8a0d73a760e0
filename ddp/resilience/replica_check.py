"""Replicas compared while they train: DDP keeps them equal bit for bit, unless something else writes to one.

DDP sends gradients, never parameters (except at construction). A bit that flips in one rank's memory, an optimizer that
depends on the rank, a gradient clipped before it was averaged: from then on the ranks train different models, and nothing
says so. So now and then each rank sends a digest of every parameter, 8 bytes, and all compare.

A GPU hashes its parameters itself, so that 8 bytes of each leave it, and the host waits once.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.by_hand.replicas import replicated

MOST_NAMED = 3
HASHING_DEVICES = ("cuda",)  # which hash faster than their memory could be copied to the host
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes; of unsigned ones CUDA makes no hash


class ReplicasDiverged(RuntimeError):
    """The ranks' parameters are no longer the same. All ranks raise it."""


def require_equal_replicas(network: nn.Module, step: int) -> None:
    """Compare a digest, or on a GPU a hash, of every parameter over the ranks of the default group: a collective of 8 bytes per
    parameter, for any training loop.

    Buffers are not compared: BatchNorm's running statistics are each rank's own between epochs.

    :param network: the same on all ranks, memory formats included, as DDP requires too; of any dtypes, on any device
    :param step: for the message
    :raises ReplicasDiverged: on every rank, naming the first tensors that differ, and on which ranks if more than half of
        the ranks agree. A single flipped bit is always found; another difference is missed once in 2^32. (A GPU does not see
        that elements of a parameter have changed places, or that an even number of them have changed in the same bits.)
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    parameters = replicated(network, buffers=False)
    device = next(iter(parameters.values())).device
    if device.type in HASHING_DEVICES:
        own = torch.stack([hash_of(parameter) for parameter in parameters.values()])
    else:
        own = torch.tensor([digest(parameter) for parameter in parameters.values()], device=device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    by_rank = torch.stack(everyone).tolist()
    lines = differences(list(parameters), list(zip(*by_rank, strict=True)))
    if lines:
        more = f", and {len(lines) - MOST_NAMED} more" if len(lines) > MOST_NAMED else ""
        raise ReplicasDiverged(f"at step {step} the replicas have diverged: {', '.join(lines[:MOST_NAMED])}{more}")


def hash_of(tensor: Tensor) -> Tensor:
    """The exclusive or of the tensor's elements as bits: int64, 0-d, on its device; any shape and dtype, NaNs included."""
    elements = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    bits = elements.view(BITS[elements.element_size()])  # as floats, some NaNs would be the same
    return torch.hash_tensor(bits).view(torch.int64) if bits.numel() else bits.new_zeros((), dtype=torch.int64)


def digest(tensor: Tensor) -> int:
    """CRC-32 of the tensor's bytes as they lie in memory; any shape and dtype, on any device, NaNs included.

    It finds every single flipped bit.
    """
    dims = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)  # channels_last is read as it lies, not copied
    dense = tensor.detach().cpu().permute(dims).contiguous()
    return zlib.crc32(dense.view(-1).view(torch.uint8).numpy().data)


def differences(names: Sequence[str], digests: Sequence[Sequence[int]]) -> list[str]:
    """A line for each parameter on which the ranks differ.

    :param digests: of each parameter, those of all ranks
    """
    lines = []
    for name, values in zip(names, digests, strict=True):
        usual, agreeing = Counter(values).most_common(1)[0]
        if agreeing == len(values):
            continue
        where = f"between the {len(values)} ranks"  # without a majority, the right value is unknown
        if 2 * agreeing > len(values):
            others = [str(rank) for rank, value in enumerate(values) if value != usual]
            where = f"on rank{'s' * (len(others) > 1)} {', '.join(others)} of {len(values)}"
        lines.append(f"parameter {name!r} differs {where}")
    return lines
