"""Clipping by the norm of all gradients, of which a rank holds only its slices."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.training.optimization import local


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients of a sharded model so that their norm over all ranks is at most ``max_norm``. A collective.

    torch's function would clip each rank's pieces by their own norm: the ranks would scale their slices differently.

    :param model: what :func:`ddp.sharded.stages.shard` returned, or another whose ``parameters()`` are this rank's part of
        each: pieces or DTensors; ``process_group`` are the ranks
    :returns: the norm before, 0-d; the same on every rank
    """
    gradients = [local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    gradients = [gradient for gradient in gradients if gradient.numel()]  # an empty one has no largest element
    largest = math.isinf(norm_type)
    norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    power = norm if largest else norm**norm_type
    group: Any = model.process_group
    dist.all_reduce(power, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    norm = power if largest else power ** (1 / norm_type)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grads_with_norm_
    for gradient in gradients:
        gradient.mul_(scale)
    return norm
