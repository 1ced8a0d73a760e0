"""A log's lines, each with its rank: without the prefixes of launchers, colors, timestamps, and progress bars before them."""

from __future__ import annotations

import functools
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from common.errors import UsageError
from ddp.launch.ranks import ranks_of

STANDARD_INPUT = Path("-")
CONTROL = re.compile(rb"[\0-\7\x0e-\x1a\x1c-\x1f]")  # a tenth of compressed data
HEAD_BYTES, LONGEST_LINE = 4096, 2**16  # the rest of a longer line counts as a line of its own

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07?")
PREFIX = re.compile(
    r"\[(?i:rank):? ?(\d+)\]:? ?"  # torch, Lightning, Accelerate
    r"|\[[a-z_]+(\d+)\]: ?"  # torchrun --tee: role and local rank
    r"| {0,3}(\d{1,4}): (?=\S|  |$)"  # srun --label
    r"|\[\d+,(\d+)\]<std\w+>: ?"  # mpirun --tag-output
    r"|\((?:\w+ )?pid=\d+[^)]*\) ?"  # Ray
    r"|[a-z][\w.]*-[\w.-]*\d: (?=\S|  |$)|\[pod/[^]]+\] "  # hosts, as pdsh and pods have them
    r"|[\w.-]* ?\[std(?:err|out)\] ?|std(?:err|out): |[0-9a-f]{8} \|\| "  # milabench, Accelerate, Determined
    r"|\[?\d{4}-\d\d-\d\d[T_ ]\d\d:\d\d:\d\d[^\s\]]*\]? ?|\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]? "  # timestamps
)
BARE = 3  # the group of PREFIX for srun --label
STARTS_PREFIX = frozenset("[( 0123456789abcdefghijklmnopqrstuvwxyz")
# A progress bar, or the words of another rank, may have no end of line.
BEGINS = re.compile(
    r"(?<=.)(?=\[rank\d+\]:|\[default\d+\]:\S)"
    r"|(?<=[^\s:─+|])(?<!Original)(?<!Group)(?=\s*Traceback \(most recent call last\):)"
)
ATTEMPT = re.compile(r"((?:.*[/\\])?attempt_)(\d+)[/\\]")


class Line(NamedTuple):
    rank: int | None
    text: str
    number: int  # from 1
    file: str
    is_bare: bool = False  # if its rank is but a number before a colon, which may count something else


def files_of(paths: Sequence[Path]) -> dict[Path, int | None]:
    """The files of a log, those of folders too, with the rank of each."""
    files: list[Path] = []
    for path in paths:
        files += sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    # torchrun has a folder for each start of the ranks. The last one ended the job.
    attempts = {file: (found[1], int(found[2])) for file in files if (found := ATTEMPT.match(str(file)))}
    last = dict(sorted(attempts.values()))
    return ranks_of([file for file in files if file not in attempts or attempts[file][1] == last[attempts[file][0]]])


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
        if not head or (50 * len(CONTROL.findall(head)) > len(head) and not wide):
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


def _split(text: str, rank: int | None, number: int, file: str, is_bare: bool = False) -> list[Line]:
    """The lines that are in one: without prefixes, and with the rank that these name."""
    if "\x1b" in text:
        text = ESCAPES.sub("", text)
    while text[:1] in STARTS_PREFIX and (prefix := PREFIX.match(text)):
        named = next(filter(None, prefix.groups()), None)
        if named is not None:
            rank, is_bare = int(named), prefix.lastindex == BARE
        text = text[prefix.end() :]
    if ("[" in text or "Traceback" in text) and (begin := BEGINS.search(text)):
        cut = begin.start()
        return [Line(rank, text[:cut], number, file, is_bare), *_split(text[cut:], rank, number, file, is_bare)]
    return [Line(rank, text, number, file, is_bare)]
