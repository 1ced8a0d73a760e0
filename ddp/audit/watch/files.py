"""Files that torch.save writes and torch.load reads: what is in them, who writes them, and whether they hold the live tensors."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import events
from .event_types import Load, Rename, Save
from .events import Call, Look, emit, watch, where
from .tensors import are_parameters, checksum, find_tensors, walk

_CACHES = ("<frozen", os.path.dirname(torch.__file__))  # imports and torch.compile rename what they cache


@watch(torch, "save")
def save(call: Call) -> Look:
    """A file is live if it holds a parameter's own memory, and the next step may change that while the file is written."""
    steps = events.steps
    yield
    obj, in_thread = call.get("obj"), threading.current_thread() is not threading.main_thread()
    tensors = find_tensors(obj)
    event = Save(
        path=_path(call.get("f")),
        live=(in_thread or steps != events.steps) and are_parameters(tensors),
        states=sorted(set(_states(obj))),
        checksums=[checksum(tensor) for tensor in tensors if tensor.is_floating_point()],
    )
    emit(event)


@watch(torch, "load")
def load(call: Call) -> Look:
    emit(Load(path=_path(call.get("f"))))
    yield


@watch(threading.Thread, "start")
def start(call: Call) -> Look:
    """A thread that runs a function of torch has no line of the script in its stack."""
    call.args[0]._audit_started = where()
    yield


def _on_audit_event(event: str, args: tuple[Any, ...]) -> None:
    """Python tells of every file that is renamed, by whichever function."""
    if event == "os.rename" and not sys._getframe(1).f_code.co_filename.startswith(_CACHES):
        emit(Rename(path=_path(args[1])))


def _path(f: Any) -> str | None:
    name = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", None)
    return os.path.realpath(name) if isinstance(name, (str, os.PathLike)) else None


def _states(obj: Any) -> Iterator[str]:
    """Which kinds of state an object has, by the keys by which torch's own states are known."""
    for path, value in walk(obj):
        if not isinstance(value, dict):
            continue
        if {"state", "param_groups"} <= value.keys():
            yield "optimizer"
        has_weights = any(isinstance(one, Tensor) and one.is_floating_point() for one in value.values())
        if has_weights and "state" not in path[:-1]:  # those of an optimizer are below state and a number
            yield "model"


sys.addaudithook(_on_audit_event)
