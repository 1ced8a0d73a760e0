"""Clipping by the norm of all gradients, of which a rank holds only its shards."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.training.optimization import local


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for a model that is sharded over all ranks of the default process group. A collective.

    torch's function would clip each rank's shards by their own norm: the ranks would scale theirs differently.

    :param parameters: the ``parameters()`` of what :func:`ddp.sharded.stages.shard` returned, or of a model by ``fully_shard``
    :param max_norm: of all ranks' gradients together, after this
    :returns: the norm before, 0-d, in fp32 or a wider dtype; the same on every rank
    """
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    # At least fp32, since squares overflow in fp16. Empty shards count here: so all ranks see all dtypes, and choose the same.
    dtype = functools.reduce(torch.promote_types, [one.dtype.to_real() for one in gradients], torch.float32)
    gradients = [gradient for gradient in gradients if gradient.numel()]
    square = torch.nn.utils.get_total_norm(gradients).to(dtype) ** 2
    dist.all_reduce(square)
    norm = square**0.5
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grads_with_norm_
    for gradient in gradients:
        gradient.mul_(scale)
    return norm
