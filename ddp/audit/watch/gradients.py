"""Backward passes: the gradients that a rank computes by itself, and what stands in ``.grad`` before and after."""

from __future__ import annotations

import functools
import weakref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import unserializable_hook

from . import tensors
from .event_types import Backward, Probes, ZeroGrad
from .events import Call, Look, detailed, emit, in_backward, quiet, watch

_computed: dict[str, Tensor] = {}  # the probes by number of the parameter, in the running backward pass
_hooked: set[str] = set()


@watch(torch.optim.Optimizer, "zero_grad")
@watch(torch.nn.Module, "zero_grad")
def zero_grad(call: Call) -> Look:
    emit(ZeroGrad())
    yield


@watch(torch.autograd, "backward")
def backward(call: Call) -> Look:
    if in_backward():  # reentrant checkpointing: a part of the pass that runs
        yield
        return
    watch_parameters()
    _computed.clear()
    before = gradient_probes() if detailed() else {}
    loss = sum(one.sum().item() for one in tensors.find_tensors(call.get("tensors")))
    yield
    if not detailed():
        emit(Backward(before={}, computed={}, loss=loss, norm=None, weights={}))
        return
    computed = {number: probe.tolist() for number, probe in _computed.items()}
    weights = {n: tensors.checksum(p) for n, p in tensors.alive().items() if n in list(computed)[:1]}
    emit(Backward(before=before, computed=computed, loss=loss, norm=_norm(), weights=weights))


def watch_parameters() -> None:
    """Let each known parameter tell the gradient that this rank computes, before any wrapper averages it."""
    for number, parameter in tensors.alive().items():
        if number not in _hooked and parameter.requires_grad and parameter.is_leaf:
            hook = functools.partial(_remember, number, weakref.ref(parameter))
            parameter.register_hook(unserializable_hook(hook))
            _hooked.add(number)


@quiet()
def _remember(number: str, parameter: weakref.ref[Tensor], gradient: Tensor) -> None:
    """Some wrappers run the hooks of shards themselves, on averages. Those are not computed by autograd's node of the parameter."""
    own = parameter()
    if detailed() and own is not None and get_gradient_edge(own).node is torch._C._current_autograd_node():
        _computed[number] = tensors.probe(gradient) + _computed.get(number, 0)


def gradient_probes() -> Probes:
    """Facts about all gradients that there are."""
    return {n: tensors.probe(p.grad).tolist() for n, p in tensors.alive().items() if p.grad is not None}


def _norm() -> float | None:
    """The norm of all gradients together; None if there are none."""
    gradients = [tensors.dense(p.grad) for p in tensors.alive().values() if p.grad is not None]
    return torch.stack([g.norm().double().cpu() for g in gradients]).norm().item() if gradients else None
