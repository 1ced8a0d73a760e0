"""Python runs this at its start in every process of a watched script, since this folder is on PYTHONPATH.

It waits for torch to be imported, and then lets the module of ``FOREIGN_SCRIPT_WATCH`` watch it. That module is loaded under a name
of its own, because the script may have modules with the names of our packages. So nothing of the project is imported here.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
NAME = "_foreign_script_watch"
WATCH_VARIABLE = "FOREIGN_SCRIPT_WATCH"


class WatchTorch:
    """A finder on ``sys.meta_path`` that lets torch be found as always, and installs the watch once torch has been imported."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_watch(module: ModuleType) -> None:
                execute(module)
                _load_watch().install()

            spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


def _load_watch() -> Any:
    return _execute(importlib.util.spec_from_file_location(NAME, os.environ[WATCH_VARIABLE]))


def _execute(spec: ModuleSpec | None) -> Any:
    """The module of a spec; None if there is no such module."""
    if spec is None or spec.loader is None:
        return None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_execute(  # a sitecustomize of the machine's own, which this one hides
    PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if Path(entry or ".").resolve() != HERE])
)
if WATCH_VARIABLE in os.environ:
    sys.meta_path.insert(0, WatchTorch())
