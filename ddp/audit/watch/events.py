"""The events of one process, and where in the script they happen."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

directory = Path(os.environ["DDP_AUDIT_DIRECTORY"])
_QUICK = bool(os.environ.get("DDP_AUDIT_QUICK"))
QUICK_STEPS, QUICK_INTERVAL = 8, 16
# Code that is not the script's: the standard library, this folder, and torch and other packages.
_LIBRARIES = tuple(
    os.path.realpath(folder) + os.sep for folder in (sysconfig.get_path("stdlib"), os.path.dirname(__file__))
)
_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")

_file, _pid = -1, -1
steps = 0  # optimizer steps of this process
_busy = threading.local()


def emit(kind: str, **fields: Any) -> None:
    """Write an event. Each is written at once: a process may be killed, and a forked one must not write it again."""
    global _file, _pid
    if _pid != os.getpid():
        _pid = os.getpid()
        _file = os.open(directory / f"{_pid}.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        emit("process", pid=_pid, parent=os.getppid())
    os.write(_file, json.dumps({"kind": kind, "step": steps, **fields}).encode() + b"\n")


def detailed() -> bool:
    """Whether the running optimizer step is looked at closely; all are, but for ``--quick``."""
    return not _QUICK or steps < QUICK_STEPS or steps % QUICK_INTERVAL == 0


def frames() -> Iterator[FrameType]:
    """The frames of this thread, from the innermost."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_below(module: str) -> bool:
    """Whether a module of this name leads to the present call."""
    return any(frame.f_globals.get("__name__") == module for frame in frames())


def where(with_instruction: bool = False) -> str:
    """``file:line`` of the innermost line of the script that leads to the present call; of any code, if none is the script's.

    :param with_instruction: whether to tell calls of one line apart
    """
    outermost = ""
    for frame in frames():
        name = frame.f_code.co_filename
        if not name.startswith("<"):
            outermost = f"{name}:{frame.f_lineno}" + (f":{frame.f_lasti}" if with_instruction else "")
            if not _is_library(name):
                return outermost
    return getattr(threading.current_thread(), "_audit_started", outermost)


def called_by_script() -> bool:
    """Whether the script itself has called the watched function, and not torch or another library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and os.path.realpath(frame.f_code.co_filename).startswith(_LIBRARIES[-1]):
        frame = frame.f_back
    return frame is not None and not _is_library(frame.f_code.co_filename)


def _is_library(file: str) -> bool:
    file = os.path.realpath(file)
    return file.startswith(_LIBRARIES) or _PACKAGES.search(file) is not None


def watch(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace ``owner.name`` by the decorated function, which gets the original as its first argument.

    Quiet functions get the original itself, and so does torch.compile.
    """
    original = getattr(owner, name)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or getattr(_busy, "now", False):
                return original(*args, **kwargs)
            return function(original, *args, **kwargs)

        setattr(owner, name, watched)
        return function

    return decorate


def gradients_enabled() -> bool:
    """Whether the script has gradients enabled, as seen from a quiet function."""
    return bool(_busy.gradients)


def quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that only looks: no gradients, nothing else is watched meanwhile, and its own errors do not reach the script."""

    @functools.wraps(function)
    def looking(*args: Any, **kwargs: Any) -> Any:
        before, _busy.now, _busy.gradients = getattr(_busy, "now", False), True, torch.is_grad_enabled()
        try:
            with torch.no_grad():
                return function(*args, **kwargs)
        except Exception:
            emit("watch_error", what=function.__qualname__, text=traceback.format_exc(limit=4))
        finally:
            _busy.now = before

    return looking
