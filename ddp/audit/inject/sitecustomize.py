"""Python runs this at its start in every process of an audited script, since the audit puts this folder on PYTHONPATH.

It waits for torch to be imported, and then lets :mod:`ddp.audit.watch` watch it. The watching code is loaded under another name
than ``ddp``, because the script may have a module of that name.
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
NAME = "_ddp_audit_watch"


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
    return _execute(importlib.util.spec_from_file_location(NAME, HERE.parent / "watch" / "__init__.py"))


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
if "DDP_AUDIT_DIRECTORY" in os.environ:
    sys.meta_path.insert(0, WatchTorch())
