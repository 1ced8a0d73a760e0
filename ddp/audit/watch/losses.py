"""Loss functions: over how many terms each takes its mean, and with which factor the result enters the backward pass.

A term's weight in the step follows from both, whatever the script divides or multiplies in between.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .events import Call, Look, emit, quiet, watch, where
from .tensors import probe

CLASSES = ("cross_entropy", "nll_loss")
ELEMENTS = (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)


@watch(F, *CLASSES, *ELEMENTS)
def loss(call: Call) -> Look:
    yield
    if not call.result.requires_grad:
        return
    target = call.get("target")
    terms = target.numel()
    if call.function.__name__ in CLASSES:
        if call.get("weight") is not None:
            return  # terms of different weights by design
        terms = len(target) if target.is_floating_point() else int((target != call.get("ignore_index", -100)).sum())
    samples = len(target) if target.dim() else 1
    of = {"samples": samples, "probes": [probe(call.get("input")), probe(target)]}
    of |= {"where": where(), "call": where(with_instruction=True)}
    call.result.register_hook(functools.partial(_weighted, call.get("reduction", "mean"), terms, of))


@quiet()
def _weighted(reduction: str, terms: int, of: dict[str, Any], factor: Tensor) -> None:
    factors = factor.detach().double()
    factors = factors[factors != 0]  # a term that is masked has no weight
    terms = factors.numel() if reduction == "none" else terms if factors.numel() else 0
    weight = factors.mean().item() / (terms if reduction == "mean" else 1) if terms else 0.0
    emit("loss", terms=terms, weight=weight, is_mean=reduction == "mean", **of)
