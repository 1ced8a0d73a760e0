"""The page: what the cases' docstrings say, their code, and what they print.

torchrun --nproc_per_node=2 -m ddp.conformance.differences  (runs all cases, and writes README.md)
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Mapping
from types import ModuleType

from ddp.conformance import differences

SECTIONS = ("gradients", "static_graph", "modules", "refused", "late")


def cases() -> dict[str, ModuleType]:
    """The cases' modules by their names (``gradients.two_backwards``), in the page's order."""
    found = {}
    for section in SECTIONS:
        package = importlib.import_module(f"{differences.__name__}.{section}")
        for module in pkgutil.iter_modules(package.__path__):
            name = f"{section}.{module.name}"
            found[name] = importlib.import_module(f"{differences.__name__}.{name}")
    return found


def page(outputs: Mapping[str, list[str]]) -> str:
    """The page as Markdown.

    :param outputs: what each case prints, by the case's name
    """
    modules, parts = cases(), [f"# {inspect.getdoc(differences)}"]
    for section in SECTIONS:
        parts.append(f"## {inspect.getdoc(importlib.import_module(f'{differences.__name__}.{section}'))}")
        parts += [entry(name, modules[name], outputs[name]) for name in modules if name.startswith(f"{section}.")]
    return "\n\n".join(parts) + "\n"


def entry(name: str, module: ModuleType, output: list[str]) -> str:
    """One case."""
    title, _, text = (inspect.getdoc(module) or "").partition("\n")
    path = f"{name.replace('.', '/')}.py"
    shown = "\n".join(["```python", program(module), "```", "", "```text", *output, "```"])
    return f"### {title}\n\n[{path}]({path})\n{text}\n\n{shown}"


def program(module: ModuleType) -> str:
    """A case's code without its imports."""
    source = inspect.getsource(module)
    start = re.search(r"^(@|class |def )", source, re.MULTILINE)
    assert start is not None
    return re.sub(r"  # type: ignore.*", "", source[start.start() :].partition("\n\n\nif __name__")[0])
