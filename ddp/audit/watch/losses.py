"""Loss functions: over how many terms each takes its mean, and with which factor the result enters the backward pass.

A term's weight in the step follows from both, whatever the script divides or multiplies in between.
"""

from __future__ import annotations

import dataclasses
import functools

import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import unserializable_hook

from .event_types import Local, Loss
from .events import Call, Look, call_chain, emit, quiet, thread, watch, where
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
SAME = 1e-3  # terms of one mean have the same factor, but for rounding


@watch(F, *CLASSES, *ELEMENTS)
def loss(call: Call) -> Look:
    yield
    if not call.result.requires_grad:
        return
    target = call.get("target")
    terms = target.numel()
    if call.function.__name__ in CLASSES:
        if call.get("weight") is not None:
            _emit_local("class weights are normalized by each rank's own batch")
            return  # terms of different weights by design
        terms = len(target) if target.is_floating_point() else int((target != call.get("ignore_index", -100)).sum())
    samples = len(target) if target.dim() else 1
    reduction = call.get("reduction", "mean")
    event = Loss(
        where=where(),
        call=call_chain(),
        samples=samples,
        terms=terms,
        weight=0.0,
        is_mean=reduction == "mean",
        probes=[probe(call.get("input")).tolist(), probe(target).tolist()],
        share=0.0,
    )
    # torch.save leaves such hooks out, and warns of others.
    call.result.register_hook(unserializable_hook(functools.partial(_weighted, reduction, event, call.result.detach())))


@watch(F, "batch_norm")
def batch_norm(call: Call) -> Look:
    yield
    if call.get("training") and thread.gradients:
        _emit_local("BatchNorm has statistics of each rank's own batch")


@watch(DistributedDataParallel, "register_comm_hook")
def hook(call: Call) -> Look:
    _emit_local("a communication hook may compress gradients")
    yield


@functools.cache
def _emit_local(why: str) -> None:
    emit(Local(why=why))


@quiet()
def _weighted(reduction: str, event: Loss, value: Tensor, factor: Tensor | None) -> None:
    if factor is None:
        return  # DDP passes none on to an output that is not in the backward pass
    factors = factor.detach().double()
    share = (factors * value).sum().item()
    factors = factors[factors != 0]  # a term that is masked has no weight
    if factors.numel() and factors.abs().max() > (1 + SAME) * factors.abs().min():
        return  # terms of different weights by design, such as a mean of sequences' means
    terms = factors.numel() if reduction == "none" else event.terms if factors.numel() else 0
    weight = factors.mean().item() / (terms if reduction == "mean" else 1) if terms else 0.0
    emit(dataclasses.replace(event, terms=terms, weight=weight, share=share))
