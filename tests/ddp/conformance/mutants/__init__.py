"""Wrappers with one defect each, by the check that must find it.

python -m ddp.conformance tests.ddp.conformance.mutants:gradients_are_the_average_of_the_ranks --only "average of the ranks"
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

MUTANTS: dict[str, Any] = {}
for _module in pkgutil.iter_modules(__path__):
    MUTANTS |= importlib.import_module(f"{__name__}.{_module.name}").MUTANTS


def __getattr__(name: str) -> Any:
    try:
        return MUTANTS[name]
    except KeyError:
        raise AttributeError(f"no mutant is for the check {name}") from None
