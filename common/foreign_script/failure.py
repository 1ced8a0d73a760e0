"""The error that ended a foreign script, in one line that says where it was raised, and what the script needs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from common.foreign_script.run import Outcome

# Packages whose kernels run on GPUs alone.
OF_GPUS = ("apex", "bitsandbytes", "deep_ep", "flash_attn", "transformer_engine", "triton", "xformers")
PROJECT = re.escape(os.fspath(Path(__file__).parents[2]))
# No code of the script; within the project, it is what runs in the script's processes.
LIBRARY = re.compile(rf"site-packages|dist-packages|/lib/python3|^<|^{PROJECT}/(common/foreign_script|.+/watch)/")
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def why_failed(outcome: Outcome) -> str:
    """The error that ended a script, and its line."""
    lines = outcome.traceback.splitlines()
    error = next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)), "")
    if not error or "ChildFailedError" in error:
        return f"the script failed with exit status {outcome.status}, and wrote no traceback"
    place = (list(own_lines(outcome.traceback)) or ["an unknown place"])[-1]
    package = re.search(r"No module named '(\w+)", error)
    if package and package[1] in OF_GPUS:
        return f"the script needs kernels of a GPU: {place} imports {package[1]}"
    if package:
        return f"the script needs a package that is missing: {place} imports {package[1]}"
    if error.startswith("FileNotFoundError"):
        return f"the script needs a file that is not there: {place}: {error}"
    if error.startswith("MemoryError") or "can't allocate memory" in error or "out of memory" in error:
        return f"the script needs more memory than there is: {place}: {error}"
    return f"the script failed: {place}: {error}"


def own_lines(stack: str) -> Iterator[str]:
    """``file:line`` of each frame that is in no library, in the order of a stack or a traceback."""
    for frame in FRAME.finditer(stack):
        if not LIBRARY.search(frame["file"]):
            yield short(f"{frame['file']}:{frame['line']}")


def short(place: str) -> str:
    """``file:line`` as it is printed: below the working directory without its path."""
    return place.removeprefix(os.getcwd() + os.sep)
