"""Files that torch.save writes and torch.load reads: what is in them, who writes them, and whether they hold the live tensors."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from typing import Any

import torch
from torch import Tensor

from . import events, tensors
from .events import emit, quiet, watch, where
from .tensors import checksum, find_tensors

_TEMPORARY = os.path.realpath(tempfile.gettempdir())  # where libraries write files of their own
_CACHES = ("<frozen", os.path.dirname(torch.__file__))  # imports and torch.compile rename what they cache
PROGRESS = ("ep", "iter", "batch")  # epoch, ep, step, global_step, ...


def install() -> None:
    @watch(torch, "save")
    def save(original: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        steps = events.steps
        result = original(obj, f, *args, **kwargs)
        _saved(obj, f, steps != events.steps)
        return result

    @watch(threading.Thread, "start")
    def start(original: Any, self: Any) -> None:
        self._audit_started = where()  # a thread that runs a function of torch has no line of the script in its stack
        original(self)

    sys.addaudithook(_on_audit_event)

    @watch(torch, "load")
    def load(original: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        emit("load", path=_path(f))
        return original(f, *args, **kwargs)


def _on_audit_event(event: str, args: tuple[Any, ...]) -> None:
    """Python tells of every file that is opened or renamed, by whichever function."""
    if event == "os.rename" and not sys._getframe(1).f_code.co_filename.startswith(_CACHES):
        emit("rename", source=_path(args[0]), path=_path(args[1]), where=where())
    elif event == "open" and isinstance(args[0], str) and args[2] & (os.O_WRONLY | os.O_RDWR):
        path = os.path.realpath(args[0])
        if os.path.dirname(path) != _TEMPORARY and not path.startswith((os.fspath(events.directory), "/dev/")):
            emit("write", path=path)


@quiet
def _saved(obj: Any, f: Any, torn: bool) -> None:
    places = {_place(parameter) for parameter in tensors.alive().values()}
    emit(
        "save",
        path=_path(f),
        alias=any(_place(tensor) in places for tensor in find_tensors(obj)),
        thread=threading.current_thread() is not threading.main_thread(),
        torn=torn,
        where=where(),
        **_content(obj),
    )


def _path(f: Any) -> str | None:
    name = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", None)
    return os.path.realpath(name) if isinstance(name, (str, os.PathLike)) else None


def _place(tensor: Tensor) -> int:
    return tensors.local(tensor).detach().untyped_storage().data_ptr()


def _content(obj: Any) -> dict[str, Any]:
    """Which kinds of state an object has, by the keys by which torch's own states are known."""
    found = {"model": False, "optimizer": False, "scaler": False, "schedule": False, "progress": False}
    if isinstance(obj, (list, tuple)):
        found["progress"] = any(isinstance(one, int) for one in obj)
    for path, value in _dicts(obj):
        keys = set(value)
        found["optimizer"] |= {"state", "param_groups"} <= keys
        found["scaler"] |= {"scale", "growth_factor"} <= keys
        found["schedule"] |= "last_epoch" in keys
        is_model = any(isinstance(one, Tensor) and one.is_floating_point() for one in value.values())
        found["model"] |= is_model and "state" not in path[:-1]  # those of an optimizer are below state and a number
        if not keys & {"last_epoch", "growth_factor", "param_groups", "exp_avg"} and "param_groups" not in path:
            found["progress"] |= any(
                isinstance(key, str) and isinstance(one, int) and any(word in key.lower() for word in PROGRESS)
                for key, one in value.items()
            )
    floating = [t for t in find_tensors(obj) if t.is_floating_point()]
    return {**found, "checksums": [checksum(t) for t in floating[: len(tensors.parameters)]]}


def _dicts(obj: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], dict[Any, Any]]]:
    if len(path) > 4:
        return []
    own = [(path, obj)] if isinstance(obj, dict) else []
    below = obj.items() if isinstance(obj, dict) else enumerate(obj) if isinstance(obj, (list, tuple)) else ()
    return own + [one for key, value in below for one in _dicts(value, (*path, str(key)))]
