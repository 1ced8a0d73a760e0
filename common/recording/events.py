"""From the events of all processes to lanes: spans one below another, lines of source, and messages between lanes."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Span(NamedTuple):
    """What a lane does for a while.

    :ivar start: seconds since the recording begins; so is ``end``
    :ivar depth: how many spans it lies in
    :ivar note: what the call was about, such as sample numbers or a weight
    """

    start: float
    end: float
    name: str
    note: str
    nbytes: int
    depth: int


class Message(NamedTuple):
    """A tensor from one lane to another; sent at ``start``, taken at ``end``."""

    start: float
    end: float
    sender: str
    receiver: str
    nbytes: int


@dataclass
class Lane:
    """A thread of a process, or what runs beside it.

    :ivar lines: moments, each with the number of a source and of its line that begins
    """

    name: str
    spans: list[Span] = field(default_factory=list)
    lines: list[tuple[float, int, int]] = field(default_factory=list)


@dataclass
class Recording:
    """What was recorded between two moments.

    :ivar milestones: the ends of rank 0's steps, at which two recordings of one script are in step
    """

    lanes: list[Lane]
    messages: list[Message]
    seconds: float
    milestones: list[float]


def read(folder: Path, window: tuple[str, int, str, int], milestone: str) -> Recording:
    """Read what the processes wrote.

    :param window: from the first start of the n-th span of one name to the last end of the m-th span of another, each counted in its
        lane; empty names stand for the first and the last moment
    :param milestone: the name of the spans whose ends are milestones
    """
    events = sorted(
        (json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()),
        key=lambda event: event["t"],
    )
    origin = events[0]["t"]
    lanes: dict[str, Lane] = {}
    ended = {(event["pid"], event["end"]): event for event in events if "end" in event}
    last = {event["pid"]: _seconds(event, origin) for event in events}  # a killed process ends no span
    started: dict[str, list[int]] = defaultdict(list)  # the processes of a name, one after the other
    sent: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    received: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        attempts = started[event["process"]]
        if event["pid"] not in attempts:
            attempts.append(event["pid"])
        if attempt := attempts.index(event["pid"]):
            event["process"] += f", attempt {attempt + 1}"
        name = _lane_of(event)
        lane = lanes.setdefault(name, Lane(name))
        now = _seconds(event, origin)
        if "line" in event:
            lane.lines.append((now, event["file"], event["line"]))
        elif "begin" in event:
            over = ended.get((event["pid"], event["begin"]), {})
            end = _seconds(over, origin) if over else last[event["pid"]]
            depth = sum(1 for span in lane.spans if span.end > now)
            note = over.get("note") or event.get("note") or ""
            lane.spans.append(Span(now, end, event["name"], note, event.get("bytes", 0), depth))
            if "to" in event:
                sent[event["process"], f"rank {event['to']}"].append((now, event["bytes"]))
            elif "source" in event:
                received[f"rank {event['source']}", event["process"]].append(end)
    messages = [
        Message(start, end, *pair, nbytes)
        for pair, starts in sent.items()
        for (start, nbytes), end in zip(starts, received[pair], strict=False)
    ]
    return _cut(list(lanes.values()), messages, window, milestone)


def _seconds(event: dict[str, Any], origin: int) -> float:
    return float(event["t"] - origin) / 1e9


def _lane_of(event: dict[str, Any]) -> str:
    thread = "" if event["thread"] == "MainThread" else event["thread"].rpartition("_")[0] or event["thread"]
    return ", ".join(part for part in (event["process"], event.get("lane") or thread) if part)


def _cut(lanes: list[Lane], messages: list[Message], window: tuple[str, int, str, int], milestone: str) -> Recording:
    """The part of the recording within the window, from 0 on."""
    first, first_count, last, last_count = window
    starts = [
        _of_name(lane, first)[first_count - 1].start for lane in lanes if len(_of_name(lane, first)) >= first_count
    ]
    ends = [_of_name(lane, last)[last_count - 1].end for lane in lanes if len(_of_name(lane, last)) >= last_count]
    begin = min(starts) if first else 0.0
    end = max(ends) if last else max(span.end for lane in lanes for span in lane.spans)
    kept = []
    for lane in sorted(lanes, key=lambda lane: _order(lane.name)):
        spans = [span for span in lane.spans if span.start < end and span.end > begin]
        clipped = [
            span._replace(start=max(span.start, begin) - begin, end=min(span.end, end) - begin) for span in spans
        ]
        lines = [(moment - begin, file, line) for moment, file, line in lane.lines if begin <= moment <= end]
        if clipped or lines:
            kept.append(Lane(lane.name, clipped, lines))
    inside = [
        message._replace(start=message.start - begin, end=message.end - begin)
        for message in messages
        if message.start >= begin and message.end <= end
    ]
    main = next(lane for lane in lanes if lane.name in ("rank 0", "process"))
    milestones = [span.end - begin for span in _of_name(main, milestone) if begin < span.end <= end]
    return Recording(kept, inside, end - begin, milestones)


def _of_name(lane: Lane, name: str) -> list[Span]:
    return [span for span in lane.spans if span.name == name]


def _order(name: str) -> tuple[str, ...]:
    """Lanes of a process stand together, its main thread first."""
    return tuple(name.split(", "))
