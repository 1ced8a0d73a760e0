"""Spans: what ran, from when to when, in which lane. One recorder for everything that is drawn or traced over time.

Moments are seconds of ``time.perf_counter``, which on Linux is CLOCK_MONOTONIC: all processes of a machine share it, so spans of
several processes need no alignment. To record a span costs a tuple in a list; a GPU's moments are CUDA events, which are read
when the recording is over (common/reporting/clock.py).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.files.atomic_files import write_json
from common.reporting.clock import HostClock

COUNTERS = "counters"  # the lane of counters: there a span has no length, and its facts are the values from then on

Interval = tuple[float, float]


class Span(NamedTuple):
    """Something that ran.

    :param start: seconds
    :param end: seconds
    :param lane: the thread, or the kind of work
    :param facts: of any kind, for the viewer of a trace
    """

    name: str
    start: float
    end: float
    lane: str
    facts: dict[str, Any]

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Recorder:
    """Records the spans of a process's threads, and of the processes that get a copy of it by fork or by pickle.

    :param clock: stamps the moments
    :param folder: an existing folder, where other processes write their spans; without one, they cannot
    """

    def __init__(self, clock: HostClock | None = None, folder: Path | None = None) -> None:
        self.clock, self._folder, self._owner = clock or HostClock(), folder, os.getpid()
        self._pid, self._spans = self._owner, deque[tuple[str, Any, Any, str, dict[str, Any]]]()
        self._last: dict[str, Any] = {}  # the stamp at which the next lap of a lane begins
        self._facts: dict[int, dict[str, Any]] = {}  # by thread

    def add(self, name: str, start: Any, end: Any, lane: str = "", **facts: Any) -> None:
        """Record a span with known stamps.

        :param lane: the thread's name if empty
        """
        if self._pid != os.getpid():  # a copy: the first process keeps its own spans
            self._pid, self._spans = os.getpid(), deque()
        lane = lane or threading.current_thread().name
        self._spans.append((name, start, end, lane, {**self.facts, **facts}))

    @contextlib.contextmanager
    def span(self, name: str, lane: str = "") -> Iterator[None]:
        """Record the block as a span. The lane's next lap begins with it."""
        start = self._last[lane] = self.clock.stamp()
        try:
            yield
        finally:
            self.add(name, start, self.clock.stamp(), lane)

    def lap(self, name: str, lane: str) -> None:
        """Record a span from the end of the lane's last lap, or the begin of a span since, until now: the laps of a lane leave no gap."""
        now = self.clock.stamp()
        self.add(name, self._last[lane], now, lane)
        self._last[lane] = now

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that this thread's spans get now."""
        return self._facts.get(threading.get_ident(), {})

    @contextlib.contextmanager
    def within(self, **facts: Any) -> Iterator[None]:
        """Give these facts to all spans that this thread records in the block. Another process writes its spans at the end."""
        self._facts[threading.get_ident()] = facts
        try:
            yield
        finally:
            del self._facts[threading.get_ident()]
            self.flush()

    def flush(self) -> None:
        """Write the spans of a process that is not the first. It may be killed later, and then runs no exit handlers."""
        if self._folder is not None and self._owner != os.getpid() == self._pid:
            with open(self._folder / str(self._pid), "ab") as file:
                pickle.dump(self.take(), file)

    def take(self) -> list[Any]:
        """The spans of this process since the last call, for :meth:`read`."""
        return [self._spans.popleft() for _ in range(len(self._spans))]  # other threads may append meanwhile

    def read(self, taken: Iterable[Any]) -> list[Span]:
        """Read the stamps of the spans. They are sorted by their start, outer spans before inner ones."""
        seconds = self.clock.seconds
        spans = [Span(name, seconds(start), seconds(end), lane, facts) for name, start, end, lane, facts in taken]
        return sorted(spans, key=lambda span: (span.start, -span.end))

    def collect(self) -> list[Span]:
        """The spans of all processes, sorted. Other processes must have flushed theirs."""
        taken = self.take()
        for path in self._folder.iterdir() if self._folder else ():
            with open(path, "rb") as file, contextlib.suppress(EOFError, pickle.UnpicklingError):
                while True:  # the last record of a killed process may be cut off
                    taken += pickle.load(file)
        return self.read(taken)


def in_lane(spans: Iterable[Span], lane: str) -> list[Span]:
    """The spans of a lane."""
    return [span for span in spans if span.lane == lane]


def shifted(spans: Iterable[Span], origin: float) -> list[Span]:
    """The same spans, counted from ``origin``."""
    return [span._replace(start=span.start - origin, end=span.end - origin) for span in spans]


def stacked(intervals: Iterable[Interval]) -> list[int]:
    """For each interval, in order of their starts, the first of several rows in which it overlaps none before."""
    free: list[float] = []
    rows = []
    for start, end in intervals:
        row = next((row for row, moment in enumerate(free) if moment <= start), len(free))
        free[row : row + 1] = [end]
        rows.append(row)
    return rows


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals into disjoint ones, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """The total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def overlap(some: Sequence[Interval], others: Sequence[Interval]) -> float:
    """The length of what two lists of disjoint intervals have in common."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in itertools.product(some, others))


def trace_events(processes: Mapping[str, Sequence[Span]]) -> list[dict[str, Any]]:
    """The events of a trace in Chrome's format, which https://ui.perfetto.dev opens: a lane is a thread, and times are microseconds.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

    A process's lanes are shown in the order in which they first occur. Spans of a lane that overlap and do not nest, which the format
    forbids, get further lanes.

    :param processes: by name, their spans, sorted by their start with outer spans before inner ones, in seconds from the
        beginning of the trace
    """
    events: list[dict[str, Any]] = []
    for pid, (process, spans) in enumerate(processes.items()):
        tids: dict[tuple[str, int], int] = {}
        ends: dict[tuple[str, int], list[float]] = {}  # of the spans of a lane that are not over yet
        for span in spans:
            row = 0
            while not _has_room(ends.setdefault((span.lane, row), []), span):
                row += 1
            tid = tids.setdefault((span.lane, row), len(tids))
            kind = {"ph": "C"} if span.lane == COUNTERS else {"ph": "X", "dur": 1e6 * span.seconds}
            moment = {"name": span.name, "ts": 1e6 * span.start, "pid": pid, "tid": tid, "args": span.facts}
            events.append({**moment, **kind})
        for (lane, row), tid in tids.items():
            names = {
                "process_name": {"name": process},
                "thread_name": {"name": f"{lane} {row + 1}" if row else lane},
                "thread_sort_index": {"sort_index": tid},
            }
            events += [{"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args} for kind, args in names.items()]
    return events


def _has_room(ends: list[float], span: Span) -> bool:
    """Whether the span nests in those of a row, or follows them; then it is added to them."""
    while ends and ends[-1] <= span.start:
        ends.pop()
    if ends and span.end > ends[-1]:
        return False
    ends.append(span.end)
    return True


def write_trace(path: Path, processes: Mapping[str, Sequence[Span]]) -> None:
    """Write :func:`trace_events` to a file.

    :raises OSError: when it cannot be written
    """
    write_json(path, {"traceEvents": trace_events(processes), "displayTimeUnit": "ms"})
