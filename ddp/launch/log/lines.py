"""A log's lines, each with its rank: without the prefixes of launchers, colors, timestamps, and progress bars before them."""

from __future__ import annotations

import functools
import io
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from common.errors import UsageError

STANDARD_INPUT = Path("-")
HEAD_BYTES, LONGEST_LINE = 4096, 2**16  # the rest of a longer line counts as a line of its own

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07?")
PREFIX = re.compile(
    r"\[(?i:rank):? ?(\d+)\]:? ?"  # torch, Lightning, Accelerate
    r"|\[[a-z_]+(\d+)\]: ?"  # torchrun --tee: role and local rank
    r"| {0,3}(\d{1,4}): (?=\S|  |$)"  # srun --label
    r"|\[\d+,(\d+)\]<std\w+>: ?"  # mpirun --tag-output
    r"|\((?:\w+ )?pid=\d+[^)]*\) ?"  # Ray
    r"|[\w.-]* ?\[std(?:err|out)\] ?|std(?:err|out): |[0-9a-f]{8} \|\| "  # milabench, Accelerate, Determined
    r"|\[?\d{4}-\d\d-\d\d[T_ ]\d\d:\d\d:\d\d[^\s\]]*\]? ?|\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]? "  # timestamps
)
STARTS_PREFIX = frozenset("[( 0123456789abcdefghijklmnopqrstuvwxyz")
# A progress bar, or the words of another rank, may have no end of line.
BEGINS = re.compile(
    r"(?<=.)(?=\[rank\d+\]:|\[default\d+\]:\S)"
    r"|(?<=[^\s:─+|])(?<!Original)(?<!Group)(?=\s*Traceback \(most recent call last\):)"
)
MOST_RANKS = 4096  # larger numbers in names of files are of jobs
RANK_OF_FILE = re.compile(r"(?:rank|task|proc|attempt_\d+/)[-_.]?(\d+)")


class Line(NamedTuple):
    rank: int | None
    text: str
    number: int  # from 1
    file: str


def files_of(paths: Sequence[Path]) -> dict[Path, int | None]:
    """The files of a log, those of folders too, with the rank of each: files whose names differ in one number have it from there."""
    files: list[Path] = []
    for path in paths:
        files += sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    alike = defaultdict(list)
    for file in files:
        alike[re.sub(r"\d+", "#", str(file))].append(file)
    ranks: dict[Path, int | None] = {}
    for group in alike.values():
        numbers = list(zip(*(map(int, re.findall(r"\d+", str(file))) for file in group), strict=True))
        differing = [column for column in numbers if len(set(column)) > 1 and max(column) < MOST_RANKS]
        for place, file in enumerate(group):
            named = RANK_OF_FILE.search(file.as_posix())
            ranks[file] = differing[-1][place] if differing else int(named[1]) if named else None
    return ranks


def read(path: Path, rank: int | None) -> Iterator[Line]:
    """The lines of a file, or of standard input.

    :param rank: of the lines that do not name theirs
    :raises UsageError: if it is empty or no text
    """
    with open(sys.stdin.fileno() if path == STANDARD_INPUT else path, "rb") as stream:
        name = "standard input" if path == STANDARD_INPUT else str(path)
        head = stream.peek(HEAD_BYTES)[:HEAD_BYTES]
        wide = head[:2] in (b"\xff\xfe", b"\xfe\xff")  # PowerShell's
        # torch itself ends a message with a zero byte.
        if not head or (20 * head.count(b"\0") > len(head) and not wide):
            raise UsageError(f"{name} is {'binary' if head else 'empty'}, and no log: {len(head)} bytes were read")
        text: IO[str]
        if path.name == "error.json":
            text = io.StringIO(_callstack(stream.read()))
        else:
            text = io.TextIOWrapper(stream, "utf-16" if wide else "utf-8", errors="replace", newline="")
        number = 1
        for raw in iter(functools.partial(text.readline, LONGEST_LINE), ""):
            yield from _split(raw.rstrip("\r\n\0"), rank, number, name)
            number += raw.endswith("\n")


def _callstack(content: bytes) -> str:
    """The traceback in an error file of ``@record``."""
    try:
        message = json.loads(content)["message"]
        return str(message["extraInfo"]["py_callstack"])
    except (ValueError, LookupError, TypeError):
        return ""


def _split(text: str, rank: int | None, number: int, file: str) -> list[Line]:
    """The lines that are in one: without prefixes, and with the rank that these name."""
    if "\x1b" in text:
        text = ESCAPES.sub("", text)
    while text[:1] in STARTS_PREFIX and (prefix := PREFIX.match(text)):
        named = next(filter(None, prefix.groups()), None)
        rank = rank if named is None else int(named)
        text = text[prefix.end() :]
    if ("[" in text or "Traceback" in text) and (begin := BEGINS.search(text)):
        cut = begin.start()
        return [Line(rank, text[:cut], number, file), *_split(text[cut:], rank, number, file)]
    return [Line(rank, text, number, file)]
