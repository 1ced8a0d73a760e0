"""Loss functions: over how many terms each takes its mean, and with which factor the result enters the backward pass.

A term's weight in the step follows from both, whatever the script divides or multiplies in between.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .events import emit, quiet, watch, where
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


def install() -> None:
    for name in (*CLASSES, *ELEMENTS):
        _watch(name)


def _watch(name: str) -> None:
    @watch(F, name)
    def loss(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        _computed(name, result, args, kwargs)
        return result


@quiet
def _computed(name: str, result: Any, args: Any, kwargs: Any) -> None:
    if not isinstance(result, Tensor) or not result.requires_grad:
        return
    target = args[1] if len(args) > 1 else kwargs["target"]
    reduction = kwargs.get("reduction", "mean")
    terms = target.numel()
    if name in CLASSES:
        if kwargs.get("weight") is not None or (len(args) > 2 and args[2] is not None):
            return  # terms of different weights by design
        terms = len(target) if target.is_floating_point() else int((target != kwargs.get("ignore_index", -100)).sum())
    samples = len(target) if target.dim() else 1
    of = {"samples": samples, "probes": [*probe(args[0]).tolist(), *probe(target).tolist()]}
    of |= {"where": where(), "call": where(with_instruction=True)}
    result.register_hook(functools.partial(_weighted, reduction, terms, of))


@quiet
def _weighted(reduction: str, terms: int, of: dict[str, Any], factor: Tensor) -> None:
    factors = factor.detach().double()
    factors = factors[factors != 0]  # a term that is masked has no weight
    terms = factors.numel() if reduction == "none" else terms if factors.numel() else 0
    weight = factors.mean().item() / (terms if reduction == "mean" else 1) if terms else 0.0
    emit("loss", terms=terms, weight=weight, is_mean=reduction == "mean", **of)
