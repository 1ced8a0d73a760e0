"""All that a log tells of a failure, gathered in one pass: tracebacks, exit codes, the watchdogs' lines, and who is there at all."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import UsageError
from ddp.launch.log import watchdog
from ddp.launch.log.errors import SPAWNED, Error, Tracebacks
from ddp.launch.log.exit_codes import code_of
from ddp.launch.log.lines import Line, files_of, read
from ddp.launch.ranks import MOST_RANKS

FACTS = {
    "rank": r"^\s*rank\s*: (?P<rank>\d+) \(local_rank: \d+\)",  # torchrun's report, as the next two
    "code": r"^\s*exitcode\s*: (?P<code>-?\d+)",
    "failed": r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)",
    "ended": r"(?:Sending|Closing) process \d+ (?:closing |via )",  # by torchrun, after the first failure
    "forced": r"forcefully exiting via|via Signals\.SIGKILL",
    "tasks": r"srun: error: \S+: tasks? (?P<tasks>[\d,-]+): (?P<words>.*)",
    "spawned": r"process (?P<rank>\d+) terminated with (?P<words>(?:signal|exit code) \w+)",
    "memory": r"[Oo]ut of memory: Killed process|OOMKilled|[Oo][Oo][Mm][-_ ][Kk]ill|Out Of Memory",
    "scheduler": r"(?:CANCELLED|STEPD?|JOB) .*DUE TO (?P<words>[A-Z ]+)",
    "cancelled": r"(?:STEP|JOB) .*CANCELLED AT (?!.*DUE TO)",
    "abort": r"(?:free\(\): invalid|double free or|"
    r"malloc\(\): |munmap_chunk|corrupted (?:size|double)|Assertion [`'].*failed)",
    "usage": r"^\S*(?:\.py|torchrun|accelerate|deepspeed)\S*: error: (?P<words>.+)|"
    r"(?P<start>can't open file .+|: No module named .+|execve\(\): .+)",
    "shell": r"(?P<words>exits with return code = -?\d+|"  # DeepSpeed's launcher
    r"(?<!: )(?:Segmentation fault|Bus error|Aborted|Killed|Terminated)(?= *\(core dumped\)|\s*$|\s{3,}))",
    "world": r"world.?size['\"]?[ =:]+(?P<world>\d+)|MEMBER: \d+/(?P<members>\d+)|\brank:? (?P<rank>\d+)(?: of |/)(?P<of>\d+)",
    "outside": r"Received (?P<number>\d+) death signal",  # by torchrun
}
PATTERNS = {name: re.compile(pattern) for name, pattern in FACTS.items()}
# A line without any of these words tells nothing. To look for them is some ten times as fast as to try the patterns.
WORDS = """\
Traceback
File "
rror:
xception
Fatal Python
NCCL
enqueued
lagging
collective #
():
exitcode
ing process
entire process
terminated with
SIGKILL
oom
OOM
f memory
f Memory
DUE TO
CANCELLED
corrupted
double free
Assertion
open file
No module
fault
Aborted
Killed
Terminated
world
MEMBER
death signal
return code
rank
""".splitlines()
LINES_AT_ONCE = 500
MOST_OF_A_KIND = 2000


class Evidence:
    """The facts of a log."""

    def __init__(self) -> None:
        self.tracebacks = Tracebacks()
        self.watchdogs = watchdog.Watchdogs()
        self.facts: defaultdict[str, list[tuple[Line, re.Match[str]]]] = defaultdict(list)
        self._lines_of: Counter[tuple[int, bool]] = Counter()  # by rank, and whether it is a bare number
        self._in_world: set[int] = set()
        self.ends: dict[str, int] = {}  # by file, its last line
        self.lines = self.files = 0
        self._in_report: int | None = None  # the rank of whose failure a launcher's report tells

    def take(self, lines: Iterator[Line]) -> None:
        """Read a file."""
        for some in iter(lambda: list(itertools.islice(lines, LINES_AT_ONCE)), []):
            self.lines += len(some)
            self.ends[some[-1].file] = some[-1].number
            self._lines_of.update((line.rank, line.is_bare) for line in some if line.rank is not None)
            if self._is_open() or has_keyword("\n".join(line.text for line in some)):
                for line in some:
                    if self._is_open() or has_keyword(line.text):
                        self._take(line)
        self._in_report = None
        self.files += 1

    def _is_open(self) -> bool:
        """Whether the next line may belong to something that has begun."""
        return bool(self.tracebacks.open) or self._in_report is not None

    def _take(self, line: Line) -> None:
        for name, pattern in PATTERNS.items():
            if (found := pattern.search(line.text)) and len(self.facts[name]) < MOST_OF_A_KIND:
                self.facts[name].append((line, found))
                if name == "rank":
                    self._in_report = int(found["rank"])
                elif name == "world":
                    self._note_world(found)
        if spawned := SPAWNED.search(line.text):
            self._in_report = int(spawned["rank"])
        if line.text.startswith(("=====", "-----")):
            self._in_report = None
        self.watchdogs.feed(line.text, line.rank)
        self.tracebacks.feed(line if self._in_report is None else line._replace(rank=self._in_report))

    def _note_world(self, found: re.Match[str]) -> None:
        size = int(found["world"] or found["members"] or found["of"])
        if 1 <= size <= MOST_RANKS:
            self._in_world |= {*range(size)}

    @property
    def ranks(self) -> set[int]:
        """All that the log names. A bare number before a colon counts if it comes on two lines."""
        return self._in_world | {rank for (rank, bare), lines in self._lines_of.items() if not bare or lines > 1}

    @property
    def errors(self) -> list[Error]:
        return [error for error in self.tracebacks.errors.values() if error.kind]

    @functools.cached_property
    def codes(self) -> dict[int, int]:
        """The exit code of each rank that a launcher reports, the first one first: torchrun's report has it at its end."""
        facts = self.facts
        report = zip(facts["rank"], facts["code"], strict=False)
        pairs: list[tuple[Any, Any]] = [(rank["rank"], code["code"]) for (_, rank), (_, code) in report][::-1]
        # Without the report, there are local ranks at best, and srun's tasks are ranks only without torchrun.
        pairs = pairs or [(found["rank"], found["code"]) for _, found in facts["failed"]]
        if not pairs and not facts["ended"]:
            for _, found in facts["tasks"]:
                pairs += [(task, code_of(found["words"])) for task in _numbers(found["tasks"])]
        pairs += [(found["rank"], code_of(found["words"])) for _, found in facts["spawned"]]
        codes: dict[int, int] = {}
        for rank, code in pairs:
            if code is not None:
                codes.setdefault(int(rank), int(code))
        return codes


def gathered(paths: list[Path]) -> Evidence:
    """Read files, and all that folders have.

    :raises UsageError: if there is no log
    """
    evidence = Evidence()
    refused: list[UsageError] = []
    for file, rank in files_of(paths).items():
        try:
            evidence.take(read(file, rank))
        except UsageError as error:  # a folder has empty files and checkpoints, too
            refused.append(error)
    if not evidence.files:
        raise UsageError(
            str(refused[0]) if len(refused) == 1 else f"{paths[0]} has no log: {len(refused)} files were read"
        )
    return evidence


def _numbers(text: str) -> list[int]:
    """``0-2,5``"""
    ends = [[int(end) for end in part.split("-")] for part in text.split(",") if part]
    return [number for pair in ends for number in range(pair[0], pair[-1] + 1)]


def has_keyword(text: str) -> bool:
    return any(map(text.__contains__, WORDS))
