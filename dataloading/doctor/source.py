"""Lines of the script: their text, and which of them makes an attribute or calls a function."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterable


def text_of(place: str) -> str:
    """The text of ``file:line``."""
    file, _, line = place.rpartition(":")
    return linecache.getline(file, int(line)).strip() if file else ""


def line_of_attribute(file: str, owner: str, attribute: str) -> str:
    """``file:line`` where a class makes an attribute of ``self``, or a module a global; empty if it is not found.

    :param owner: the class; empty for the module
    """
    for node in ast.walk(ast.parse("".join(linecache.getlines(file)))):
        if (isinstance(node, ast.ClassDef) and node.name == owner) or (isinstance(node, ast.Module) and not owner):
            for inner in ast.walk(node):
                made = inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", None)]
                for target in made:
                    if getattr(target, "attr" if owner else "id", None) == attribute:
                        return f"{file}:{inner.lineno}"  # type: ignore[attr-defined]
    return ""


def first_line(pattern: str, files: Iterable[str]) -> str:
    """``file:line`` of the first line of these files that matches; empty if none does."""
    for file in files:
        for number, text in enumerate(linecache.getlines(file), 1):
            if re.search(pattern, text) and not text.lstrip().startswith(("#", "import", "from")):
                return f"{file}:{number}"
    return ""
