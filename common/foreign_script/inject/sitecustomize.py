"""Python runs this at its start in every process of a watched script, since this folder is on PYTHONPATH.

It waits for torch to be imported, and then lets the modules of ``FOREIGN_SCRIPT_WATCH`` watch it. They are loaded under names
of their own, because the script may have modules with the names of our packages. So nothing of the project is imported here. It also
writes down which error has ended a process.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

HERE = Path(__file__).parent
WATCH_VARIABLE = "FOREIGN_SCRIPT_WATCH"
TRACEBACKS_VARIABLE = "FOREIGN_SCRIPT_TRACEBACKS"  # a folder for those of the errors that end a process
LOCAL_RANK_VARIABLE = "FOREIGN_SCRIPT_LOCAL_RANK"  # a flag, and the script or module that gets its local rank by it


class WatchTorch:
    """A finder on ``sys.meta_path`` that lets torch be found as always, and installs what watches once torch has been imported."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        sys.meta_path.insert(0, self)  # a library may only ask whether there is torch, before another imports it
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def execute_and_watch(module: ModuleType) -> None:
                execute(module)
                _watch()

            spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


def _watch() -> None:
    for watch in os.environ[WATCH_VARIABLE].split(os.pathsep):
        _load(Path(watch)).install()


def _load(watch: Path) -> Any:
    return _execute(importlib.util.spec_from_file_location(f"_foreign_script_{watch.parent.name}", watch))


def _execute(spec: ModuleSpec | None) -> Any:
    """The module of a spec; None if there is no such module."""
    if not (spec and spec.loader):
        return None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _write_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    with open(os.path.join(os.environ[TRACEBACKS_VARIABLE], f"{os.getpid()}.traceback"), "w") as file:
        traceback.print_exception(kind, error, trace, file=file)
    sys.__excepthook__(kind, error, trace)


_execute(  # a sitecustomize of the machine's own, which this one hides
    PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if Path(entry or ".").resolve() != HERE])
)
if LOCAL_RANK_VARIABLE in os.environ and "LOCAL_RANK" in os.environ:
    flag, _, script = os.environ[LOCAL_RANK_VARIABLE].partition(os.pathsep)
    if sys.orig_argv[-len(sys.argv)] == script:  # and not a process that it starts; argv[0] of a module is still "-m"
        sys.argv.insert(1, f"{flag}={os.environ['LOCAL_RANK']}")
if TRACEBACKS_VARIABLE in os.environ:
    sys.excepthook = _write_traceback
if WATCH_VARIABLE in os.environ and "torch" in sys.modules:  # by a .pth file
    _watch()
elif WATCH_VARIABLE in os.environ:
    sys.meta_path.insert(0, WatchTorch())
