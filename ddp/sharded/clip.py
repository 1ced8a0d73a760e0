"""Clipping by the norm of all gradients, of which a rank holds only its slices."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.sharded.zero1 import ZeRO1


@torch.no_grad()
def clip_grad_norm_(model: ZeRO1, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients of a sharded model so that their norm over all ranks is at most ``max_norm``. A collective.

    torch's function would clip each rank's pieces by their own norm: the ranks would scale their slices differently.

    :returns: the norm before, 0-d; the same on every rank
    """
    gradients = [piece.grad for piece in model.parameters() if piece.grad is not None]
    largest = math.isinf(norm_type)
    norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    power = norm if largest else norm**norm_type
    dist.all_reduce(power, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=model.process_group)
    norm = power if largest else power ** (1 / norm_type)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm
