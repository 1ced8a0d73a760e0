"""Backward passes that run at the same time in one process: one within another, or of several wrappers of the same parameters.

A reentrant checkpoint computes a part of the graph again, and runs a backward pass on it within the whole one. Each pass calls its
own callbacks when it ends, so a wrapper whose callback belongs to the inner one would average too early. It must know whether its
first gradient comes in the outer pass.
"""

from __future__ import annotations

import sys
import threading
import weakref
from types import FrameType
from typing import Protocol

from torch.autograd import graph

from ddp.by_hand import errors

_RUN = graph._engine_run_backward.__code__


class Running(Protocol):
    """A reducer whose backward pass runs."""

    ids: set[int]  # of its parameters
    as_view: bool  # whether it puts views into its buckets where the gradients are

    def goes_on(self) -> bool:
        """Whether no exception has ended its pass."""


_running: weakref.WeakSet[Running] = weakref.WeakSet()


def enter(reducer: Running, is_whole: bool) -> None:
    """A backward pass of this reducer begins on this thread.

    :param is_whole: whether it begins at what forward returned
    :raises RuntimeError: if it may be a part of the whole, or if two reducers would replace each other's gradients by views
    """
    if not is_whole and _is_within_another_pass():
        raise errors.unknown_beginning()
    sharing = [one for one in _running if not one.ids.isdisjoint(reducer.ids) and one is not reducer and one.goes_on()]
    if any(one.as_view or reducer.as_view for one in sharing):
        raise errors.two_wrappers()
    _running.add(reducer)


def leave(reducer: Running) -> None:
    """Its pass is over."""
    _running.discard(reducer)


def _is_within_another_pass() -> bool:
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
