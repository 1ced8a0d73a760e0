"""Stacks of Python as faulthandler, ``py-spy dump`` and our watchdog write them: where the main thread of a process is."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

THREAD = re.compile(r"^(?:Current thread|Thread) .+$", re.MULTILINE)
FAULTHANDLER = re.compile(r'^ +File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
PY_SPY = re.compile(r"^ +(?P<name>\S.*) \((?P<file>\S+):(?P<line>\d+)\)$", re.MULTILINE)
LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3|^<")
SHORT_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy"}  # py-spy leaves out where packages lie


class Frame(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        where = f"{PurePath(self.file.replace(chr(92), '/')).name}:{self.line}"
        return where if self.function == "<module>" else f"{where} in {self.function}()"

    @property
    def is_library(self) -> bool:
        path = PurePath(self.file)
        return bool(LIBRARY.search(self.file)) or (
            not path.is_absolute() and path.parts[0].removesuffix(".py") in SHORT_LIBRARIES
        )


def users_frame(frames: Sequence[Frame]) -> Frame | None:
    """The latest call in the user's own code, for frames of which the latest call is the first."""
    return next((frame for frame in frames if not frame.is_library), None)


def main_threads(text: str) -> list[str]:
    """Where the main thread is in each dump of a text: the line of the user's code, and the collective in which it waits."""
    edges = [*(match.start() for match in THREAD.finditer(text)), len(text)]
    found = []
    for start, end in itertools.pairwise(edges):
        matches = list(FAULTHANDLER.finditer(text, start, end)) or list(PY_SPY.finditer(text, start, end))
        frames = [Frame(match["file"], int(match["line"]), match["name"]) for match in matches]
        if frames and frames[-1].function == "<module>":
            waits = [f", which waits in {frame.function}" for frame in frames if "distributed_c10d" in frame.file][-1:]
            found.append(f"{users_frame(frames) or frames[0]}{''.join(waits)}")
    return found
