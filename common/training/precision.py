"""Automatic mixed precision: autocast and GradScaler behind one small object.

``fp32``: neither. ``bf16``: autocast; its exponent is fp32's, so gradients neither overflow nor vanish and need no scaling.
``fp16``: autocast and a :class:`torch.amp.GradScaler`, since gradients below 6e-8 would become zero; it multiplies the loss
and divides the gradients, skips a step whose gradients overflowed, and halves the scale. The weights stay fp32 in all.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

PRECISIONS = ("fp32", "bf16", "fp16")


class Precision:
    """One run's policy. The scaler does nothing unless it is fp16, so the training step reads the same in all three.

    :param name: of :data:`PRECISIONS`; :param device: where the model lives
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self._device = device
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def autocast(self) -> torch.autocast:
        """The region in which matrix products and convolutions take the low precision. Backward belongs outside it."""
        dtype = torch.float16 if self.name == "fp16" else torch.bfloat16
        return torch.autocast(self._device.type, dtype=dtype, enabled=self.name != "fp32")


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients in place so that their total 2-norm is at most ``max_norm``; a 0-d tensor, the norm before.

    Call it after ``scaler.unscale_``: scaled gradients have a norm that means nothing. With DDP every rank holds the same
    averaged gradients, so every rank computes the same norm and no collective is needed.
    """
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
