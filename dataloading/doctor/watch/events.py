"""The events of one process, a JSON object a line, and the line of the script that leads to one."""

from __future__ import annotations

import functools
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

DIRECTORY_VARIABLE = "LOADER_DOCTOR_DIRECTORY"
# Code that is not the script's: the standard library, the doctor, the stand-in for GPUs, and torch and other packages.
_DOCTOR = Path(__file__).resolve().parents[1]
_LIBRARIES = {Path(sysconfig.get_path("stdlib")).resolve(), _DOCTOR, _DOCTOR.parents[1] / "common" / "foreign_script"}
_PACKAGES = ("site-packages", "dist-packages")

lines: dict[int, str] = {}  # where the script itself made a loader of the data set with this id
_directory = os.environ.get(DIRECTORY_VARIABLE)  # of the events of all processes; None while nothing is watched
_files: dict[str, int] = {}


def begin(directory: str | None) -> None:
    """Write events into another directory from now on; with None, none."""
    global _directory
    _directory = directory
    for file in _files.values():
        os.close(file)
    _files.clear()


def watched() -> bool:
    """Whether events are written."""
    return _directory is not None


def path_of(suffix: str) -> str:
    """A file of this process."""
    return f"{_directory}/{os.getpid()}.{suffix}"


def file_of(suffix: str) -> int:
    """A file of this process, which a forked one does not share."""
    if suffix not in _files:
        _files[suffix] = os.open(path_of(suffix), os.O_CREAT | os.O_RDWR, 0o600)
    return _files[suffix]


def emit(kind: str, **fields: Any) -> None:
    """Write an event at once, since a process may be killed."""
    if watched():
        os.write(file_of("events"), json.dumps({"kind": kind, **fields}, default=str).encode() + b"\n")


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that led to it, from the innermost."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def where(made: Any = None) -> str:
    """``file:line`` of the innermost line of the script that leads to the present call; empty if none does.

    :param made: an object whose own constructors are left out
    """
    for frame in frames(sys._getframe(1)):
        constructs = made is not None and frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is made
        if is_own(frame.f_code.co_filename) and not constructs:
            return line_of(frame)
    return ""


def made_at(loader: Any, dataset: Any, maker: FrameType) -> str:
    """``file:line`` that makes a loader. If a library makes it for the data set of a loader of the script, the line of that loader.

    :param maker: the frame that calls the loader's constructor
    """
    line = where(loader)
    if is_own(maker.f_code.co_filename):
        lines[id(dataset)] = line
    return lines.get(id(dataset), line)


def line_of(frame: FrameType | None) -> str:
    """``file:line``; empty without a frame."""
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


@functools.cache
def is_own(file: str) -> bool:
    """Whether a file is the script's, and no library's."""
    path = Path(file).resolve()
    return not file.startswith("<") and not any(
        part in _LIBRARIES or part.name in _PACKAGES for part in (path, *path.parents)
    )


def replace(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let the decorated function, which gets the original and its arguments, take the place of an owner's function."""

    def decorate(substitute: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(owner, name)

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return substitute(original, *args, **kwargs) if watched() else original(*args, **kwargs)

        setattr(owner, name, replaced)
        return substitute

    return decorate


os.register_at_fork(after_in_child=_files.clear)
