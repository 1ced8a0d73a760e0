"""Refusals of what averaging gradients does not allow; each says what to do instead.

Some need to know which backward passes run at the same time in one process: one within another, or of several wrappers of the same
parameters. A reentrant checkpoint computes a part of the graph again, and runs a backward pass on it within the whole one. Each
pass calls its own callbacks when it ends, so a wrapper whose callback belongs to the inner one would average too early. It must
know whether its first gradient comes in the outer pass.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Protocol

from torch import nn
from torch.autograd import graph
from torch.autograd.graph import Node, get_gradient_edge

_RUN = graph._engine_run_backward.__code__
WITHOUT_FORWARD = (
    "gradients became ready with no forward pass of the wrapper before, so they are not averaged: call the wrapper, model(x), and "
    "not model.module(x)"
)


def unused(names: Sequence[str], remaining: Sequence[int]) -> RuntimeError:
    """:param remaining: for each parameter, how often its gradient still has to become ready"""
    without = [name for name, missing in zip(names, remaining, strict=True) if missing > 0]
    return RuntimeError(
        f"backward gave no gradient to {len(without)} of {len(names)} parameters: {first_of(without)}. This rank's loss does not "
        "depend on them: pass find_unused_parameters=True and no static_graph, or freeze them before wrapping"
        ". (torch's words: Expected to have finished reduction in the prior iteration)"
    )


def ready_twice(name: str) -> RuntimeError:
    return RuntimeError(
        f"the gradient of {name} became ready more often than expected in one backward pass: do several checkpoints use it? "
        "Checkpoint with use_reentrant=False, or pass static_graph=True if every backward pass uses it as often, and leave it out "
        "if not. (torch's words: Expected to mark a variable ready only once; Your training graph has changed in this iteration)"
    )


def unknown_beginning() -> RuntimeError:
    return RuntimeError(
        "the backward pass of a reentrant checkpoint came before one that begins at what forward returned, so it cannot be told "
        "from the whole one, whose gradients are averaged: checkpoint with use_reentrant=False, or return the output in tuples, "
        "lists, dicts or dataclasses, where it is found"
    )


def compiled_autograd() -> NotImplementedError:
    return NotImplementedError(
        "compiled autograd traces backward, where hooks cannot start all-reduces: compile the module, not its backward pass"
    )


def two_wrappers() -> RuntimeError:
    return RuntimeError(
        "two wrappers of the same parameters take part in one backward pass, and both would let .grad be a view into their "
        "buckets: wrap a module that holds both parts, or pass gradient_as_bucket_view=False to both"
    )


def sparse(shape: Iterable[int]) -> RuntimeError:
    return RuntimeError(f"a gradient of {list(shape)} is sparse: build its embedding with sparse=False")


def changed(module: nn.Module, names: Sequence[str], nodes: Iterable[Node]) -> RuntimeError | None:
    """An error if parameters were converted or replaced after wrapping: their gradients come from other nodes, without our hooks.

    :param nodes: which had accumulated the gradients of the parameters of these names when they were wrapped
    """
    now = dict(
        module.named_parameters()
    )  # pruning and weight norm make of a parameter a function of others: it is missing
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


def unfrozen() -> RuntimeError:
    return RuntimeError(
        "parameters that were frozen when they were wrapped now require gradients, which would not be averaged: wrap again"
    )


def first_of(names: Sequence[str]) -> str:
    """The first five names, for a message."""
    return ", ".join(names[:5]) + ", ..." * (len(names) > 5)


class Running(Protocol):
    """A reducer, as other reducers see it."""

    ids: set[int]  # of its parameters
    as_view: bool  # whether it puts views into its buckets where the gradients are

    def goes_on(self) -> bool:
        """Whether its backward pass is running, and no exception has ended it."""


_reducers: weakref.WeakSet[Running] = weakref.WeakSet()  # those that had a backward pass


def enter(reducer: Running, is_whole: bool) -> None:
    """A backward pass of this reducer begins on this thread.

    :param is_whole: whether it begins at what forward returned
    :raises RuntimeError: if it may be a part of the whole, or if two reducers would replace each other's gradients by views
    """
    if not is_whole and is_within_another_pass():
        raise unknown_beginning()
    if any(one.as_view or reducer.as_view for one in sharing(reducer)):
        raise two_wrappers()
    _reducers.add(reducer)


def sharing(reducer: Running) -> list[Running]:
    """The reducers of the same parameters that another wrapper has, and whose backward pass is running."""
    return [one for one in _reducers if not one.ids.isdisjoint(reducer.ids) and one is not reducer and one.goes_on()]


def is_within_another_pass() -> bool:
    """Whether the backward pass that runs on this thread was started by the backward function of a node in another one.

    Each pass that Python started has a frame of torch's ``_engine_run_backward`` on the stack of the thread that started it. Autograd's
    own threads, one per GPU, have none of the outermost.
    """
    outermost = 0 if isinstance(threading.current_thread(), threading._DummyThread) else 1
    frame: FrameType | None = sys._getframe()
    passes = 0
    while frame is not None:
        passes += frame.f_code is _RUN
        frame = frame.f_back
    return passes > outermost
