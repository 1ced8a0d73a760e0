"""Chrome's trace event format, which https://ui.perfetto.dev opens: spans over time, in lanes.

A lane is a thread of a process. The format stores microseconds.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.files.atomic_files import write_json
from common.reporting.spans import COUNTERS, Span

Event = dict[str, Any]


def trace_events(processes: Mapping[str, Sequence[Span]]) -> list[Event]:
    """The events of a trace.

    A process's lanes are shown in the order in which they first occur. Spans of a lane that overlap and do not nest, which the format
    forbids, get further lanes.

    :param processes: by name, their spans, sorted by their start with outer spans before inner ones, in seconds from the
        beginning of the trace
    """
    events: list[Event] = []
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
                "process_sort_index": {"sort_index": pid},
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


def write_trace(path: Path, events: Sequence[Event]) -> None:
    """Write a trace file.

    :raises OSError: when it cannot be written
    """
    write_json(path, {"traceEvents": events, "displayTimeUnit": "ms"})
