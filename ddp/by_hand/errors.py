"""What a model may do that averaging its gradients does not allow, and what to do about it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn


def unused(names: Sequence[str], remaining: Sequence[int]) -> RuntimeError:
    """:param remaining: for each parameter, how often its gradient still has to become ready"""
    without = [name for name, missing in zip(names, remaining, strict=True) if missing > 0]
    return RuntimeError(
        f"backward gave no gradient to {len(without)} of {len(names)} parameters: {_first(without)}. This rank's loss does not "
        "depend on them: pass find_unused_parameters=True and no static_graph, or freeze them before wrapping"
    )


def ready_twice(name: str, static_graph: bool) -> RuntimeError:
    remedy = (
        "static_graph=True promises that every backward pass uses it as often as the first one: leave that out"
        if static_graph
        else "checkpoint with use_reentrant=False, or pass static_graph=True if every backward pass uses it as often"
    )
    return RuntimeError(
        f"the gradient of {name} became ready more often than expected in one backward pass: do several checkpoints use it? "
        + remedy
    )


def ready_too_late(name: str) -> RuntimeError:
    return RuntimeError(
        f"the gradient of {name} became ready after the gradients were averaged: the backward pass of a checkpoint, within the "
        "whole one, was taken for all of it. Checkpoint with use_reentrant=False, or return the output in tuples, lists, dicts "
        "or dataclasses, where it is found"
    )


def sparse(shape: Iterable[int]) -> RuntimeError:
    return RuntimeError(f"a gradient of {list(shape)} is sparse: build its embedding with sparse=False")


def require_same_dtypes(names: Sequence[str], parameters: Sequence[Tensor], dtypes: Iterable[torch.dtype]) -> None:
    """:raises RuntimeError: if parameters were converted after wrapping: autograd then forgets who waits for their gradients"""
    changed = [name for name, p, dtype in zip(names, parameters, dtypes, strict=True) if p.dtype != dtype]
    if changed:
        raise RuntimeError(
            f"{len(changed)} parameters have another dtype than when they were wrapped: {_first(changed)}. Their gradients "
            "are not averaged any more: convert the module first, then wrap it"
        )


def require_same_parameters(wrapped: Mapping[str, Tensor], module: nn.Module) -> None:
    """:raises RuntimeError: if the module has got other parameters after wrapping, by ``load_state_dict(assign=True)`` for one"""
    changed = [name for name, parameter in wrapped.items() if _attribute(module, name) is not parameter]
    if changed:
        raise RuntimeError(
            f"{len(changed)} parameters were replaced after wrapping: {_first(changed)}. Their gradients are not averaged any "
            "more: change values in place (load_state_dict without assign), or wrap the module again"
        )


def _attribute(module: nn.Module, name: str) -> object:
    try:
        return operator.attrgetter(name)(module)
    except AttributeError:
        return None


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + ", ..." * (len(names) > 5)
