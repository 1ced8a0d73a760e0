"""Chrome's trace event format, which https://ui.perfetto.dev opens: events over time, in lanes.

A lane is a thread of a process. Moments are in seconds from the beginning of the trace; the format stores microseconds.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.files.atomic_files import write_json

Lane = tuple[int, int]
"""The ids of a process and of one of its threads."""

Event = dict[str, Any]


def lane_names(lane: Lane, process: str, thread: str, process_position: int, thread_position: int) -> list[Event]:
    """Events that name a lane and set its place in the picture.

    :param process: name of the process
    :param thread: name of the thread
    :param process_position: place of the process, from the top
    :param thread_position: place of the thread within the process, from the top
    """
    metadata = {"ph": "M", "pid": lane[0], "tid": lane[1]}
    return [
        {**metadata, "name": "process_name", "args": {"name": process}},
        {**metadata, "name": "thread_name", "args": {"name": thread}},
        {**metadata, "name": "process_sort_index", "args": {"sort_index": process_position}},
        {**metadata, "name": "thread_sort_index", "args": {"sort_index": thread_position}},
    ]


def at(moment: float, lane: Lane) -> Event:
    """The fields that all events at a moment share. The caller adds ``ph`` and the rest."""
    return {"ts": 1e6 * moment, "pid": lane[0], "tid": lane[1]}


def complete(name: str, start: float, end: float, lane: Lane, category: str, **facts: Any) -> Event:
    """An event with a duration, which the format calls a complete event.

    :param start: in seconds
    :param end: in seconds
    :param category: for filters in the viewer
    :param facts: arguments that the viewer shows
    """
    return {**at(start, lane), "ph": "X", "name": name, "cat": category, "dur": 1e6 * (end - start), "args": facts}


def write_trace(path: Path, events: Sequence[Event]) -> None:
    """Write a trace file.

    :raises OSError: when it cannot be written
    """
    write_json(path, {"traceEvents": events, "displayTimeUnit": "ms"})
