"""The events of one process, where in the script they happen, and the watchers that look at calls of torch's functions."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .event_types import Event, NotWatched, Process, WatchError, as_line

directory = Path(os.environ["DDP_AUDIT_DIRECTORY"])
_QUICK = bool(os.environ.get("DDP_AUDIT_QUICK"))
QUICK_STEPS, QUICK_INTERVAL = 8, 16
# Code that is not the script's: the standard library, this folder, the stand-in for GPUs, and torch and other packages.
_HERE = Path(__file__).resolve().parent
_PROJECT = _HERE.parents[2]
_STAND_IN = (_PROJECT / "common" / "foreign_script", _PROJECT / "ddp" / "sync_batchnorm.py")
_LIBRARIES = {Path(sysconfig.get_path("stdlib")).resolve(), _HERE, *_STAND_IN}
_PACKAGES = ("site-packages", "dist-packages")

_file = -1
steps = 0  # optimizer steps of this process


def emit(event: Event) -> None:
    """Write an event at once, since a process may be killed."""
    os.write(_file, as_line(dataclasses.replace(event, step=steps, where=event.where or where())))


def _begin() -> None:
    """Each process has a file of its own, a forked one too."""
    global _file
    _file = os.open(directory / f"{os.getpid()}.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    emit(Process(pid=os.getpid(), parent=os.getppid()))


def detailed() -> bool:
    """Whether the running optimizer step is looked at closely; all are, but for ``--quick``."""
    return not _QUICK or steps < QUICK_STEPS or steps % QUICK_INTERVAL == 0


def frames() -> Iterator[FrameType]:
    """The frames of this thread, from the innermost."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_below(name: str) -> bool:
    """Whether a function or a module of this name leads to the present call."""
    return any(name in (frame.f_code.co_name, frame.f_globals.get("__name__")) for frame in frames())


def where() -> str:
    """``file:line`` of the innermost line of the script that leads to the present call; of any code, if none is the script's."""
    outermost = ""
    for frame in frames():
        name = frame.f_code.co_filename
        if not name.startswith("<"):
            outermost = f"{name}:{frame.f_lineno}"
            if not _is_library(name):
                return outermost
    return getattr(threading.current_thread(), "_audit_started", outermost)


def call_chain() -> str:
    """Each ``file:line:instruction`` of the script that leads to the present call: calls by one helper are told apart."""
    lines = ((frame.f_code.co_filename, frame.f_lineno, frame.f_lasti) for frame in frames())
    return " ".join(f"{name}:{line}:{at}" for name, line, at in lines if name[0] != "<" and not _is_library(name))


def in_backward() -> bool:
    """Whether a backward pass runs."""
    # HACK: by its private task id. If torch renames it, no run can be judged.
    return torch._C._current_graph_task_id() != -1


_identities = WeakIdKeyDictionary()
_next_identity = itertools.count()


def identity(of: object) -> int:
    """A number that no other object gets, unlike its id; a list, which cannot be referred to weakly, has only that."""
    try:
        return int(_identities.setdefault(of, next(_next_identity)))
    except TypeError:
        return id(of)


def called_by_script() -> bool:
    """Whether the script itself has called the watched function, and not torch or another library."""
    caller = next(frame for frame in frames() if frame.f_globals.get("__package__") != __package__)
    return not _is_library(caller.f_code.co_filename)


@functools.cache
def _is_library(file: str) -> bool:
    path = Path(file).resolve()
    return any(part in _LIBRARIES or part.name in _PACKAGES for part in (path, *path.parents))


@dataclasses.dataclass
class Call:
    """A call of a watched function.

    :ivar result: what it has returned, once it has
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None

    def get(self, name: str, default: Any = None) -> Any:
        """The argument for the parameter of this name."""
        return inspect.signature(self.function).bind(*self.args, **self.kwargs).arguments.get(name, default)


Look = Generator[None, None, None]
Watcher = Callable[[Call], Look]


class _Thread(threading.local):
    """The state of a thread: what it is doing.

    :ivar quiet: whether the audit looks at something, which is not watched itself
    :ivar gradients: whether the script had gradients enabled when the audit began to look
    :ivar running: the watchers of the calls that are running, from the outermost
    """

    quiet = False
    gradients = True

    def __init__(self) -> None:
        self.running: list[Watcher] = []


thread = _Thread()


def is_compiling() -> bool:
    """Whether torch.compile or torch.jit.trace runs the code in order to compile it, or torch.func to transform it."""
    compiles = torch.compiler.is_compiling() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]
    return compiles or torch._C._functorch.peek_interpreter_stack() is not None


def watch(owner: Any, *names: str) -> Callable[[Watcher], Watcher]:
    """Let the decorated generator look at each call of these functions of an owner.

    It runs up to its ``yield`` before the call, and goes on after it. If the call raises, the generator is closed.
    """

    def decorate(watcher: Watcher) -> Watcher:
        for name in names:
            if hasattr(owner, name):
                setattr(owner, name, _watched(getattr(owner, name), watcher))
            else:
                emit(NotWatched(name=f"{owner.__name__}.{name}"))
        return watcher

    return decorate


def _watched(function: Callable[..., Any], watcher: Watcher) -> Callable[..., Any]:
    """The function gets the call itself from quiet code, and from torch.compile and torch.jit."""

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or thread.quiet:
            return function(*args, **kwargs)
        call = Call(function, args, kwargs)
        look = watcher(call)
        with quiet():
            next(look, None)
        thread.running.append(watcher)
        try:
            call.result = function(*call.args, **call.kwargs)
        except BaseException:
            with quiet():
                look.close()
            raise
        finally:
            thread.running.pop()
        with quiet():
            next(look, None)
        return call.result

    # HACK: by these names torch.jit.script finds the function itself, which is Python's or torch's own.
    vars(watched).update(__script_if_tracing_wrapper=True, __original_fn=inspect.unwrap(function))
    if builtin := torch.jit._builtins._find_builtin(function):
        torch.jit._builtins._register_builtin(watched, builtin)
    return watched


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """For code that only looks: no gradients, nothing is watched meanwhile, and its own errors do not reach the script."""
    before, thread.quiet, thread.gradients = thread.quiet, True, torch.is_grad_enabled()
    try:
        with torch.no_grad():
            yield
    except Exception:
        emit(WatchError(text=traceback.format_exc(limit=-4)))
    finally:
        thread.quiet = before


_begin()
os.register_at_fork(after_in_child=_begin)
