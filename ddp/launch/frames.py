"""Lines of Python in logs and dumps: which file, line and function, and whether they are the user's own."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import NamedTuple

LIBRARY = re.compile(
    r"(?:site|dist)-packages|[/\\]lib(?:64)?[/\\]python\d|[/\\]Lib[/\\]|^<|bin[/\\](?:torchrun|accelerate|deepspeed)"
)
FAULTHANDLER = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)


class Frame(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function else "")

    @property
    def short(self) -> str:
        """Without the folder."""
        where = f"{PurePath(self.file.replace(chr(92), '/')).name}:{self.line}"
        return where if self.function == "<module>" else f"{where} in {self.function}()"

    @property
    def is_library(self) -> bool:
        return LIBRARY.search(self.file) is not None
