"""Stacks of Python as faulthandler, ``py-spy dump`` and our watchdog write them: where the main thread of a process is."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import PurePath

from ddp.launch.frames import FAULTHANDLER, Frame

THREAD = re.compile(r"^(?:Current thread|Thread) .+$", re.MULTILINE)
PY_SPY = re.compile(r"^ +(?P<function>\S.*) \((?P<file>\S+):(?P<line>\d+)\)$", re.MULTILINE)
SHORT_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy"}  # py-spy leaves out where packages lie


def users_frame(frames: Sequence[Frame]) -> Frame | None:
    """The latest call in the user's own code, for frames of which the latest call is the first."""
    return next((frame for frame in frames if not frame.is_library), None)


def main_threads(text: str) -> list[str]:
    """Where the main thread is in each dump of a text: the line of the user's code, and the collective in which it waits."""
    edges = [*(match.start() for match in THREAD.finditer(text)), len(text)]
    found = []
    for start, end in itertools.pairwise(edges):
        matches = list(FAULTHANDLER.finditer(text, start, end)) or list(PY_SPY.finditer(text, start, end))
        frames = [Frame(_long(match["file"]), int(match["line"]), match["function"]) for match in matches]
        if frames and frames[-1].function == "<module>":
            waits = [f", which waits in {frame.function}" for frame in frames if "distributed_c10d" in frame.file][-1:]
            found.append(f"{(users_frame(frames) or frames[0]).short}{''.join(waits)}")
    return found


def _long(file: str) -> str:
    """The path of a file with the folder of a library, which py-spy leaves out."""
    path = PurePath(file)
    is_short = not path.is_absolute() and path.parts[0].removesuffix(".py") in SHORT_LIBRARIES
    return f"site-packages/{file}" if is_short else file
