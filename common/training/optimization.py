"""The optimizer, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

# The state that an optimizer keeps for each parameter, by name: True for a tensor like the parameter, False for one float32 number.
_ADAM = {"step": False, "exp_avg": True, "exp_avg_sq": True}
STATE_OF: dict[type, dict[str, bool]] = {
    torch.optim.SGD: {"momentum_buffer": True},
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
}


def build_optimizer(
    name: str, parameters: Iterable[nn.Parameter], *, momentum: float, weight_decay: float
) -> torch.optim.Optimizer:
    """``sgd`` (Nesterov when there is momentum), ``adam`` or ``adamw``; each step sets its learning rate.

    The fused kernels update all parameters in one pass; torch has them for floating-point parameters on the CPU and CUDA.
    They update memory from its start on, so a parameter with gaps would be updated wrongly: see :func:`common.models.modules.make_dense`.
    """
    parameters = list(parameters)
    fused = all(parameter.is_floating_point() for parameter in parameters)
    if name == "sgd":
        nesterov = momentum > 0
        fused &= not any(hasattr(parameter, "to_local") for parameter in parameters)  # _fused_sgd_ takes no DTensor
        sgd = torch.optim.SGD(
            parameters, lr=0.0, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, fused=fused
        )
        begin_momentum(sgd)
        return sgd
    adam: type[torch.optim.Adam] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    return adam(parameters, lr=0.0, weight_decay=weight_decay, fused=fused)


def begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Set SGD's missing momentum buffers to zero. The steps stay the same.

    torch's fused kernel leaves a new buffer uninitialized when GradScaler finds an inf in the very first step, and takes it
    for momentum in the second.
    """
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else []:
        for parameter in group["params"] if group["momentum"] else []:
            if optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; of a DTensor, which is sharded, this rank's part."""
    own: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups, for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def learning_rate(step: int, *, schedule: str, peak: float, warmup_steps: float, total_steps: int) -> float:
    """The rate of optimizer step ``step``, counted from 0.

    ``constant`` and ``cosine`` rise linearly over ``warmup_steps`` and reach the peak with the first step after them;
    ``cosine`` (Loshchilov and Hutter, arXiv 1608.03983) then falls to 0 at ``total_steps``. ``one-cycle`` (Smith and Topin,
    arXiv 1708.07120; torch.optim.lr_scheduler.OneCycleLR) rises along a cosine from a 25th of the peak and falls to a
    10,000th of where it began, at the last step. Its peak may lie between two steps, as in torch; the others' warm-up is whole
    steps.

    Being a function of the step alone, it has no state to save, and a step that GradScaler skips does not disturb it.
    """
    if schedule == "one-cycle":
        initial, final = peak / 25, peak / 25 / 1e4
        top, last = warmup_steps - 1, total_steps - 1
        if step <= top:
            return _anneal(initial, peak, step / top if top else 1.0)
        return _anneal(peak, final, (step - top) / (last - top))
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if schedule == "cosine":
        return _anneal(peak, 0.0, (step - warmup_steps) / (total_steps - warmup_steps))
    return peak


def _anneal(start: float, end: float, share: float) -> float:
    """From ``start`` to ``end`` along half a cosine."""
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
