"""Which backward passes run at the same time in one process: one within another, or of several wrappers of the same parameters.

A reentrant checkpoint computes a part of the graph again, and runs a backward pass on it within the whole one. Each pass calls its own
callbacks when it ends, so a wrapper whose callback belongs to the inner one would average too early. It must know whether its first
gradient comes in the outer pass.
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
        raise RuntimeError(errors.UNKNOWN_BEGINNING)
    if any(one.as_view or reducer.as_view for one in sharing(reducer)):
        raise RuntimeError(errors.TWO_WRAPPERS)
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
