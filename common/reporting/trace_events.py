"""Chrome's trace event format, which https://ui.perfetto.dev opens: what was done when, in lanes.

A lane is a thread of a process. Moments are in seconds from whatever the trace begins with; the format wants microseconds.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.reporting.run_directory import write_json

Lane = tuple[int, int]
"""A process's id and a thread's, as the kernel has them."""

Event = dict[str, Any]


def lane_names(lane: Lane, process: str, thread: str, process_position: int, thread_position: int) -> list[Event]:
    """What a lane is called, and where it stands: from the top, by position."""
    place = {"ph": "M", "pid": lane[0], "tid": lane[1]}
    return [
        {**place, "name": "process_name", "args": {"name": process}},
        {**place, "name": "thread_name", "args": {"name": thread}},
        {**place, "name": "process_sort_index", "args": {"sort_index": process_position}},
        {**place, "name": "thread_sort_index", "args": {"sort_index": thread_position}},
    ]


def at(moment: float, lane: Lane) -> Event:
    """What every event has that happens at a moment; ``ph`` and the rest are to be added."""
    return {"ts": 1e6 * moment, "pid": lane[0], "tid": lane[1]}


def complete(name: str, start: float, end: float, lane: Lane, category: str, **facts: Any) -> Event:
    """Something that lasts: the format calls it a complete event.

    :param facts: shown beside it
    """
    return {**at(start, lane), "ph": "X", "name": name, "cat": category, "dur": 1e6 * (end - start), "args": facts}


def write_trace(path: Path, events: Sequence[Event]) -> None:
    """:raises OSError: when it cannot be written"""
    write_json(path, {"traceEvents": events, "displayTimeUnit": "ms"})
