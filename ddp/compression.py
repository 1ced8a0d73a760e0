"""Gradients that travel in fewer bits, by a communication hook of torch's, for torch's DDP and the one by hand.

    torchrun --nproc_per_node=2 -m ddp.train --gradient-precision bf16

A bucket is rounded to bf16, divided by the number of ranks, all-reduced, and copied back into fp32. That is half the bytes.
The sum is rounded too, so more ranks lose more. (torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def compress_gradients(model: nn.Module, precision: str) -> None:
    """Let a DDP module send its gradients in this precision.

    :param model: torch's ``DistributedDataParallel`` or ``HandwrittenDistributedDataParallel``, before its first backward pass
    :param precision: one of :data:`ddp.strategies.GRADIENT_PRECISIONS`; with ``"fp32"`` they are sent as they are
    """
    if precision == "bf16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        register_hook(model, None, bf16_compress_hook)


def register_hook(model: Any, state: Any, hook: Callable[..., Any]) -> None:
    """The model's ``register_comm_hook``, for any backend.

    torch knows ``bf16_compress_hook`` by its name, and refuses it where it was built without NCCL. gloo sums bf16 too, so the
    lambda hides the name.
    """
    model.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
