"""Optimizers that step within backward (``torch.distributed.optim._apply_optimizer_in_backward``): after the average.

By themselves they would step as soon as a gradient is ready, which is before it is averaged: the replicas would drift apart
without a word. torch's own: torch/distributed/algorithms/ddp_comm_hooks/optimizer_overlap_hooks.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.optim import apply_optimizer_in_backward


def take_over(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Remove the hooks that let optimizers step by themselves; returns the parameters that have such optimizers."""
    optimized = [parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")]
    for parameter in optimized:
        for handle in apply_optimizer_in_backward.param_to_optim_hook_handle_map.get(parameter, []):
            handle.remove()
    return optimized


def step(parameters: Iterable[Any]) -> None:
    """The gradients are averages: let each parameter's optimizers step, and drop its gradient, as torch does."""
    for parameter in parameters:
        if parameter.grad is not None:
            for optimizer in parameter._in_backward_optimizers:
                optimizer.step()
            parameter.grad = None
