"""An attempt to break a command, what came out of it, and the verdict."""

from __future__ import annotations

import contextlib
import enum
import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

MOST_BYTES = 200 * 2**20  # while a file or a value is refused

# The surroundings of an attempt: makes files in its folder, or starts a server; gives values for {names} in its command.
Scene = Callable[[Path], AbstractContextManager[Mapping[str, str]]]


class Verdict(enum.Enum):
    """The result of an attempt; all but the first are defects."""

    AS_TOLD = "as told"
    SILENT = "silently wrong"
    UNSAFE = "unsafe"
    LOST = "lost"
    HUNG = "hung"
    CRASHED = "crashed"
    TRACEBACK = "traceback"
    MEMORY = "too much memory"
    POOR = "poor message"


@dataclass(frozen=True)
class Attempt:
    """A command, and what must come out of it.

    :ivar command: as typed after ``python -m``; ``{here}`` is a fresh folder, ``{run}`` a finished run's copy in it, ``{faces}``
        a folder of photos, and a scene may give more names
    :ivar line: a regular expression that must be found in the one error line; of a command that must end well, in its output
    :ivar status: the exit status of every process
    :ivar scene: what stands around it
    :ivar ranks: further arguments of each rank of a job; without any, the command is started outside of jobs
    :ivar env: further environment; :ivar rank_env: of single ranks
    :ivar stdout: ``kept``, ``closed``, ``full`` (a full disk) or ``gone`` (a pipe that nobody reads)
    :ivar at: when this is found in its output, ``signals`` are sent
    :ivar writes: patterns of files below ``{here}`` that it may write, change or remove; a file of any other name is unsafe
    :ivar most_bytes: of memory that it may take beyond what its imports have taken, when it must be refused
    """

    command: str
    line: str
    status: int = 2
    scene: Scene | None = None
    ranks: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    rank_env: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    stdout: str = "kept"
    at: str = ""
    signals: tuple[int, ...] = ()
    writes: tuple[str, ...] = ()
    most_bytes: int = MOST_BYTES


@dataclass(frozen=True)
class Outcome:
    """The result of an attempt, as observed.

    :ivar statuses: of each process, negative for a signal; None for one that did not end in time
    :ivar bytes: of memory that the largest process took beyond its imports
    :ivar changed: files that are not as before, or not there any more; :ivar made: files that are new
    :ivar left: processes that it left running
    """

    statuses: tuple[int | None, ...]
    stdout: str
    stderr: str
    seconds: float
    bytes: int
    changed: tuple[str, ...]
    made: tuple[str, ...]
    left: tuple[str, ...]

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]


def judge(attempt: Attempt, outcome: Outcome) -> Verdict:
    """Compare what came out with what must."""
    if None in outcome.statuses or outcome.left:
        return Verdict.HUNG
    if any(status is not None and status < 0 for status in outcome.statuses):
        return Verdict.CRASHED
    if "Traceback (most recent call last)" in outcome.stderr:
        return Verdict.TRACEBACK
    for name in (*outcome.changed, *outcome.made):
        if not any(fnmatch.fnmatch(name, pattern) for pattern in attempt.writes):
            ours = name.startswith("run/") and name in outcome.changed
            return Verdict.LOST if ours else Verdict.UNSAFE
    if attempt.status and 0 in outcome.statuses:
        return Verdict.SILENT
    if attempt.status == 2 and outcome.bytes > attempt.most_bytes:
        return Verdict.MEMORY
    told = outcome.error_lines if attempt.status == 2 else [outcome.stdout + outcome.stderr]
    as_told = (
        set(outcome.statuses) == {attempt.status}
        and len(told) == 1  # over all processes
        and all(re.search(attempt.line, text) for text in told)
        and (attempt.status == 2 or not outcome.error_lines)
    )
    return Verdict.AS_TOLD if as_told else Verdict.POOR


def describe(attempt: Attempt, outcome: Outcome) -> str:
    """Tell what was done, what must come out, and what came out."""
    return (
        f"{attempt.command} {attempt.ranks or ''} {dict(attempt.env) or ''}\n"
        f"  must end with {attempt.status} and match {attempt.line!r}\n"
        f"  ended with {outcome.statuses} after {outcome.seconds:.1f} s and {outcome.bytes / 1e6:.0f} MB; "
        f"changed {outcome.changed}, made {outcome.made}, left {outcome.left}\n"
        f"  stdout: {outcome.stdout[-1000:]}\n  stderr: {outcome.stderr[-3000:]}"
    )


def made_by(make: Callable[[Path], None]) -> Scene:
    """A scene of files that a function makes in the attempt's folder."""

    @contextlib.contextmanager
    def scene(here: Path) -> Iterator[Mapping[str, str]]:
        make(here)
        yield {}

    return scene
