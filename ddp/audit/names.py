"""The names of findings: what each stands for, and which findings a user leaves out."""

from __future__ import annotations

import difflib
import linecache
import re
from collections.abc import Iterable
from pathlib import Path, PurePath

from common.errors import UsageError
from ddp.audit.finding import KINDS, Finding
from ddp.museum.__main__ import ROOT, docstring, exhibits

NAMED = "# audit: "  # in the line of an exhibit that is to blame, before the name of the finding
COMMENT = re.compile(r"# audit: ignore\[([^]]*)\]")


def require(names: Iterable[str]) -> None:
    """:raises UsageError: if there is no finding of one of these names"""
    for name in names:
        if name not in KINDS:
            near = difflib.get_close_matches(name, KINDS, cutoff=0.0)
            raise UsageError(f"{name}: there is no finding of this name; the nearest ones are {', '.join(near)}")


def explain(name: str) -> str:
    """Say what a finding is, how it is seen and what to do, and tell the stories of the exhibits that show it.

    :raises UsageError: if there is no such finding
    """
    require([name])
    how, _, what, cure, chapter = KINDS[name]
    paragraphs = [f"{name}: {what}", f"How it is seen: {how}", f"What to do: {cure}. See {ROOT / chapter}"]
    for exhibit, path in exhibits().items():
        if f"{NAMED}{name}\n" in path.read_text():
            paragraphs.append(f"Run `raw-ddp museum {exhibit}` to see it. " + "\n".join(docstring(path)))
    return "\n\n".join(paragraphs)


def require_ignored(ignore: Iterable[str], script: Path) -> None:
    """:raises UsageError: if there is no finding of a name that is ignored, by the flag or by a comment of the script"""
    require(one.partition(":")[0] for one in ignore)
    if script.is_file():
        require(name for comment in COMMENT.findall(script.read_text()) for name in _names(comment))


def is_ignored(finding: Finding, ignore: Iterable[str]) -> bool:
    """Whether a user leaves a finding out: by a comment in its line, or by ``NAME``, ``NAME:FILE`` or ``NAME:FILE:LINE``."""
    file, _, line = finding.where.rpartition(":")
    comment = COMMENT.search(linecache.getline(file, int(line)))
    if comment and finding.name in _names(comment[1]):
        return True
    for one in ignore:
        name, pattern, number = [*one.split(":"), "", ""][:3]
        if name == finding.name and PurePath(file).match(pattern or "*") and number in ("", line):
            return True
    return False


def _names(comment: str) -> list[str]:
    return [name.strip() for name in comment.split(",")]
