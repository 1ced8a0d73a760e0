"""Refusals of what averaging gradients does not allow; each says what to do instead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

WITHOUT_FORWARD = (
    "gradients became ready with no forward pass of the wrapper before, so they are not averaged: call the wrapper, model(x), and "
    "not model.module(x)"
)
UNKNOWN_BEGINNING = (
    "the backward pass of a reentrant checkpoint came before one that begins at what forward returned, so it cannot be told "
    "from the whole one, whose gradients are averaged: checkpoint with use_reentrant=False, or return the output in tuples, "
    "lists, dicts or dataclasses, where it is found"
)
COMPILED_AUTOGRAD = (
    "compiled autograd traces backward, where hooks cannot start all-reduces: compile the module, not its backward pass"
)
TWO_WRAPPERS = (
    "two wrappers of the same parameters take part in one backward pass, and both would let .grad be a view into their "
    "buckets: wrap a module that holds both parts, or pass gradient_as_bucket_view=False to both"
)
UNFROZEN = (
    "parameters that were frozen when they were wrapped now require gradients, which would not be averaged: wrap again"
)


def unused(names: Sequence[str], total: int) -> RuntimeError:
    """Parameters got no gradient.

    :param names: theirs
    :param total: the number of all parameters
    """
    return RuntimeError(
        f"backward gave no gradient to {len(names)} of {total} parameters: {first_of(names)}. This rank's loss does not "
        "depend on them: pass find_unused_parameters=True and no static_graph, or freeze them before wrapping"
        ". (torch's words: Expected to have finished reduction in the prior iteration)"
    )


def ready_twice(name: str) -> RuntimeError:
    return RuntimeError(
        f"the gradient of {name} became ready more often than expected in one backward pass: do several checkpoints use it? "
        "Checkpoint with use_reentrant=False, or pass static_graph=True if every backward pass uses it as often, and leave it out "
        "if not. (torch's words: Expected to mark a variable ready only once; Your training graph has changed in this iteration)"
    )


def if_replaced(module: nn.Module, names: Sequence[str], nodes: Iterable[Node]) -> RuntimeError | None:
    """An error if parameters were converted or replaced after wrapping: their gradients come from other nodes, without our hooks.

    :param nodes: which had accumulated the gradients of the parameters of these names when they were wrapped
    """
    now = dict(module.named_parameters())  # without those that pruning or weight norm compute from others
    changed = [
        name
        for name, node in zip(names, nodes, strict=True)
        if name in now and now[name].requires_grad and get_gradient_edge(now[name]).node is not node
    ]
    if not changed:
        return None
    return RuntimeError(
        f"{len(changed)} parameters were converted or replaced after they were wrapped: {first_of(changed)}. Their gradients are "
        "not averaged any more: convert the module first, then wrap it; and load_state_dict without assign=True"
    )


def first_of(names: Sequence[str]) -> str:
    """The first five names, for a message."""
    return ", ".join(names[:5]) + ", ..." * (len(names) > 5)
