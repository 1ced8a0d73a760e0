"""A command in this process, as ``python -m`` starts it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from common.signals import stop_request


def main_of(module: str) -> Callable[[], Any]:
    """Import what ``python -m MODULE`` runs; returns its ``main``."""
    program = importlib.import_module(module)
    if hasattr(program, "__path__"):  # a package
        program = importlib.import_module(f"{module}.__main__")
    main: Callable[[], Any] = program.main
    return main


def load_command(module: str, *arguments: str) -> Callable[[], Any]:
    """:func:`main_of` a module, with ``sys.argv`` and ``sys.orig_argv`` as ``python -m MODULE ARGUMENTS`` sets them."""
    main = main_of(module)
    stop_request.requeued_command = "ddp.train"
    sys.argv = [module, *arguments]
    sys.orig_argv = [sys.executable, "-m", *sys.argv]
    return main
