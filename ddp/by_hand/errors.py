"""What a model may do that averaging its gradients does not allow, and what to do about it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge


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


def unknown_beginning() -> RuntimeError:
    return RuntimeError(
        "the backward pass of a reentrant checkpoint came before one that begins at what forward returned, so it cannot be told "
        "from the whole one, whose gradients are averaged: checkpoint with use_reentrant=False, or return the output in tuples, "
        "lists, dicts or dataclasses, where it is found"
    )


def two_wrappers() -> RuntimeError:
    return RuntimeError(
        "two wrappers of the same parameters take part in one backward pass, and both would let .grad be a view into their "
        "buckets: wrap a module that holds both parts, or pass gradient_as_bucket_view=False to both"
    )


def sparse(shape: Iterable[int]) -> RuntimeError:
    return RuntimeError(f"a gradient of {list(shape)} is sparse: build its embedding with sparse=False")


def converted(names: Sequence[str], parameters: Sequence[Tensor], nodes: Iterable[Node]) -> RuntimeError | None:
    """An error if parameters were converted after wrapping: autograd gives them new nodes, without our hooks.

    :param nodes: which had accumulated the parameters' gradients when they were wrapped
    """
    changed = [
        name
        for name, parameter, node in zip(names, parameters, nodes, strict=True)
        if parameter.requires_grad and get_gradient_edge(parameter).node is not node
    ]
    if not changed:
        return None
    return RuntimeError(
        f"{len(changed)} parameters were converted after they were wrapped, to another dtype or device: {_first(changed)}. Their "
        "gradients are not averaged any more: convert the module first, then wrap it"
    )


def require_same_parameters(wrapped: Mapping[str, Tensor], module: nn.Module) -> None:
    """:raises RuntimeError: if the module has got other parameters after wrapping, by ``load_state_dict(assign=True)`` for one"""
    changed = [
        name for name, parameter in wrapped.items() if (now := _now(module, name)) is not None and now is not parameter
    ]
    if changed:
        raise RuntimeError(
            f"{len(changed)} parameters were replaced after wrapping: {_first(changed)}. Their gradients are not averaged any "
            "more: change values in place (load_state_dict without assign), or wrap the module again"
        )


def _now(module: nn.Module, name: str) -> nn.Parameter | None:
    """The parameter of that name, if there is one. (Pruning and weight norm make what was a parameter a function of others.)"""
    try:
        found = operator.attrgetter(name)(module)
    except AttributeError:
        return None
    return found if isinstance(found, nn.Parameter) else None


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + ", ..." * (len(names) > 5)
