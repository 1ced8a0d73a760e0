"""Backward passes: the gradients that a rank computes by itself, and what stands in ``.grad`` before and after."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from . import tensors
from .events import detailed, emit, quiet, watch, where

_computed: dict[int, Tensor] = {}  # by number of the parameter, in the running backward pass
_hooked: set[int] = set()


def install() -> None:
    @watch(torch.autograd, "backward")
    def backward(original: Any, *args: Any, **kwargs: Any) -> Any:
        before = _begin()
        result = original(*args, **kwargs)
        _end(before, where())
        return result

    @watch(torch.nn.Module, "zero_grad")
    def zero_grad(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        emit("zero_grad", where=where())
        return original(self, *args, **kwargs)


@quiet
def watch_parameters() -> None:
    """Let each known parameter tell the gradient that this rank computes, before any wrapper averages it."""
    for number, parameter in tensors.alive().items():
        if number not in _hooked and parameter.requires_grad and parameter.is_leaf:
            parameter.register_hook(functools.partial(_remember, number))
            _hooked.add(number)


@quiet
def _remember(number: int, gradient: Tensor) -> None:
    if detailed():
        own = tensors.probe(gradient)
        _computed[number] = _computed[number] + own if number in _computed else own


@quiet
def _begin() -> Any:
    watch_parameters()
    _computed.clear()
    return tensors.gradient_probes() if detailed() else None


@quiet
def _end(before: Any, line: str) -> None:
    if before is None:
        emit("backward", where=line)
        return
    weights = {n: tensors.checksum(parameter) for n, parameter in tensors.alive().items() if n in list(_computed)[:1]}
    computed = tensors.as_lists(_computed)
    emit("backward", before=before, computed=computed, norm=_norm(), weights=weights, where=line)


def _norm() -> float | None:
    """Of all gradients together; None if there are none."""
    gradients = [tensors.local(p.grad).detach() for p in tensors.alive().values() if p.grad is not None]
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    return torch.stack([g.norm().double().cpu() for g in dense]).norm().item() if dense else None
