"""The tracebacks of a log: put together rank by rank, with the last line in the user's own code; and errors that only follow others."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass, field

from ddp.launch.frames import FAULTHANDLER, Frame
from ddp.launch.log.lines import Line
from ddp.launch.log.watchdog import RANK

HEADER = "Traceback (most recent call last)"
FRAME = re.compile(
    r'^\s*File "(?P<file>.+?)", line (?P<line>\d+)(?:,? in (?P<function>.+))?'
    r"|│ (?P<rich>\S.*?\.py):(?P<number>\d+) in \S+"
)
EXCEPTION = re.compile(r"\s*(?P<kind>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:: ?(?P<message>.*)|\s*$)")
EXCEPTION_NAME = re.compile(r"(?:Error|Exception|Exit|Interrupt|Iteration|Empty|Expired)$|Exception")
FATAL = re.compile(r"Fatal Python error: (?P<message>.+)")
# An exception in C++.
UNCAUGHT = re.compile(r"(?:^\s*what\(\): +(?:.*with exception: )?|thread terminated with exception: )(?P<message>.+)")
THREAD = re.compile(r"Exception in thread (?P<name>\S+)")
SPAWNED = re.compile(r"-- Process (?P<rank>\d+) terminated with the following error")
SPAWN = re.compile(r"torch[/\\]multiprocessing[/\\]spawn\.py$")
IGNORED = re.compile(r"Exception ignored |Traceback .*ignored")
AGENT = re.compile(r"torch[/\\]distributed[/\\](?:run|launcher|elastic|launch)\b(?!.*errors)|bin[/\\]torchrun")
LINKS = {
    "Original Traceback": "worker",
    "The above exception was the direct cause": "cause",
    "During handling of the above exception": "context",
}
LONGEST_TRACEBACK = 1000  # frames
MOST_FOREIGN_LINES = 200  # within a traceback, after which it has no end
MOST_ERRORS = 5000  # that differ

# The reasons to say that an error only follows from another process's.
SUMMARY = "a launcher's summary"
DISAGREE = "the ranks do not agree"
WAITED = "it waited for another rank"
LOST = "the rank at the other end had gone"
STOPPED = "a signal from outside"
# The first that fits counts.
CONSEQUENCES = {
    r"ChildFailedError|ProcessExitedException|process \d+ terminated with|accelerate-launch|CalledProcessError.*(?:python|torchrun)": SUMMARY,
    r"Detected mismatch between collectives|op\.preamble|Received data size doesn't match|"
    r"monitoredBarrier|expects same model across all ranks": DISAGREE,
    r"Timed out waiting \d+ms for|wait timeout after|Watchdog caught|timed out in blocking wait|"
    r"Timed out after \d+ seconds waiting for clients|Some NCCL operations have failed": WAITED,
    r"Connection closed by peer|Connection reset by peer|Broken pipe|recvValue failed|got 0 bytes|sendBytes failed|"
    r"Application timeout caused pair closure|Socket closed|remote process exited|NCCL communicator was aborted|"
    r"ncclRemoteError|connectFullMesh failed|failed to connect to remote": LOST,
    r"SignalException|KeyboardInterrupt": STOPPED,
}
REASONS = [(re.compile(pattern), reason) for pattern, reason in CONSEQUENCES.items()]


@dataclass
class Error:
    """An exception, or the end of an interpreter by a signal, with its frames from the outermost on."""

    rank: int | None
    file: str  # of the log
    kind: str = ""
    message: str = ""
    frames: list[Frame] = field(default_factory=list)
    origin: str = ""  # "ignored", the name of a thread that it ended, or "worker" for a worker of a DataLoader
    handled: str = ""  # the one that was being handled when it was raised
    became: str = ""  # the exception that the user's code made of it
    last: int = 0  # the number of its last line, also if it comes again

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind

    @property
    def place(self) -> Frame | None:
        """The last line in the user's own code; without one, the last line."""
        own = [frame for frame in self.frames if not frame.is_library]
        return next(reversed(own or self.frames), None)

    @property
    def by_signal(self) -> bool:
        """Whether the process then ended by a signal."""
        return self.kind in ("Fatal Python error", "C++ exception")

    @property
    def of_agent(self) -> bool:
        """Whether it is torchrun's own."""
        return any(AGENT.search(frame.file) for frame in self.frames[:8])

    @property
    def consequence(self) -> str:
        """The reason why this error only follows another one, if it does."""
        if self.frames and self.frames[-1].function == "join" and SPAWN.search(self.frames[-1].file):
            return SUMMARY
        return next((reason for pattern, reason in REASONS if pattern.search(str(self))), "")

    @property
    def key(self) -> tuple[object, ...]:
        return self.rank, self.kind, self.message[:200], self.place


class Tracebacks:
    """Puts the tracebacks of a log together, of which those of several ranks may be mixed.

    :ivar loose: messages without a traceback
    :ivar open: the files and ranks whose next line may belong to a traceback
    """

    def __init__(self) -> None:
        self.errors: dict[tuple[object, ...], Error] = {}
        self.loose: list[Line] = []
        self.open: set[tuple[str, int | None]] = set()
        self._readers: dict[tuple[str, int | None], Generator[bool, Line, None]] = {}

    def feed(self, line: Line) -> None:
        """Take a line that begins a traceback, or follows one of the same file and rank."""
        key = line.file, line.rank
        if key not in self._readers:
            self._readers[key] = self._read()
            next(self._readers[key])
        (self.open.add if self._readers[key].send(line) else self.open.discard)(key)

    def _read(self) -> Generator[bool, Line, None]:
        """Take the lines of one rank, and tell after each whether the next one may belong to a traceback."""
        before: Error | None = None
        link = origin = ""
        line = yield False
        while True:
            error = Error(line.rank, line.file, origin=origin, last=line.number)
            if fatal := FATAL.search(line.text):
                error.kind, error.message = "Fatal Python error", fatal["message"]
                self._keep(error, None, "")
                line = yield from _innermost_first(error)
            elif uncaught := UNCAUGHT.search(line.text):
                error.kind, error.message = "C++ exception", uncaught["message"]
                if error.rank is None and (named := RANK.search(line.text)):
                    error.rank = int(named[1])
                self._keep(error, None, "")
            elif HEADER in line.text or FRAME.search(line.text):
                line, end = yield from _frames(error, line)
                if end:
                    before = self._keep(error, before, link)
                    link = origin = ""
                    line = yield from _rest_of_message(error, end["message"] == "")
            elif (found := EXCEPTION.match(line.text)) and EXCEPTION_NAME.search(found["kind"]) and found["message"]:
                self.loose = [*self.loose[:99], line]
            if thread := THREAD.search(line.text):
                origin = thread["name"]
            elif IGNORED.search(line.text):
                origin = "ignored"
            link = next((link for words, link in LINKS.items() if words in line.text), link)
            if not (HEADER in line.text or FRAME.search(line.text) or FATAL.search(line.text)):
                line = yield False

    def _keep(self, error: Error, before: Error | None, link: str) -> Error:
        """Keep an exception. If it is linked with the one before it, only the one that tells more stays.

        :returns: the one that stays
        """
        if before is not None and link == "worker":
            error.origin = link
            error.frames = _own_frames(error, before)
        elif (
            before is not None
            and link
            and (error.consequence or (link == "cause" and not before.kind.endswith("Empty")))
        ):
            before.became = before.became if error.consequence else str(error)
            before.frames = _own_frames(before, error)
            before.last = error.last
            return before
        if before is not None and link:
            self.errors.pop(before.key, None)
            error.handled = f"{before} (at {before.place})" if link == "context" else ""
        known = self.errors.setdefault(error.key, error)
        known.last = error.last
        if len(self.errors) > MOST_ERRORS:
            del self.errors[next(iter(self.errors))]
        return known


def _frames(error: Error, line: Line) -> Generator[bool, Line, tuple[Line, re.Match[str] | None]]:
    """Read a traceback up to its exception. Returns the last line, and the exception if that is it."""
    outer = _indent(line.text) if HEADER in line.text and "─" not in line.text else 0
    foreign = 0  # lines of other ranks, one after another
    while foreign < MOST_FOREIGN_LINES:
        if frame := FRAME.search(line.text):
            error.frames = error.frames[-LONGEST_TRACEBACK:]
            error.frames.append(
                Frame(frame["file"] or frame["rich"], int(frame["line"] or frame["number"]), frame["function"] or "")
            )
            foreign = 0
        elif error.frames and HEADER in line.text:  # another one begins, and this one has no end
            error.frames, outer = [], _indent(line.text)
        elif error.frames and (found := EXCEPTION.match(line.text)):
            named = EXCEPTION_NAME.search(found["kind"])
            # Another word before a colon is believed only where no other rank can have spoken.
            if (named and found["message"]) or (
                _indent(line.text) <= outer and (named or not foreign or line.rank is not None)
            ):
                error.kind, error.message, error.last = found["kind"], (found["message"] or "").strip(), line.number
                return line, found
        foreign += _indent(line.text) <= outer and line.text[:1] not in "│╰" and not frame
        line = yield True
    return line, None


def _rest_of_message(error: Error, begins_below: bool) -> Generator[bool, Line, Line]:
    """Read the lines that an exception's message goes on with, and return the one after them."""
    line = yield True
    for _ in range(4 if "NCCL error" in error.message or begins_below else 0):
        text = line.text.strip(" =")
        if HEADER in text or (error.message and (begins_below or not text)):
            break
        error.message = f"{error.message} {text}".strip()
        line = yield True
    return line


def _innermost_first(error: Error) -> Generator[bool, Line, Line]:
    """Read what faulthandler prints, and return the line after it."""
    current = False
    while True:
        line = yield True
        if "most recent call first" in line.text:
            current = "Current" in line.text
        elif frame := FAULTHANDLER.search(line.text):
            if current:
                error.frames.insert(0, Frame(frame["file"], int(frame["line"]), frame["function"]))
        elif error.frames and line.text.strip():
            return line


def _own_frames(error: Error, other: Error) -> list[Frame]:
    """The frames of an error, or those of the other one if it has none in the user's code."""
    return other.frames if all(frame.is_library for frame in error.frames) else error.frames


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())
