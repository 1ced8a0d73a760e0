"""From the events of all processes to lanes: spans one below another, lines of source, and messages between lanes."""

from __future__ import annotations

import json
import operator
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple


class Span(NamedTuple):
    """A call that a lane is in for a while.

    :ivar start: microseconds since the recording begins; so is ``end``
    :ivar depth: how many spans it lies in
    :ivar note: what the call was about, such as sample numbers or a weight
    """

    start: int
    end: int
    name: str
    note: str
    nbytes: int
    depth: int


class Message(NamedTuple):
    """A tensor from one process to another; sent at ``start``, taken at ``end``."""

    start: int
    end: int
    sender: str
    receiver: str
    nbytes: int


class Lane(NamedTuple):
    """A thread of a process, or what runs beside it.

    :ivar lines: moments, each with the number of a source and of its line that begins
    """

    name: str
    spans: list[Span]
    lines: list[tuple[int, int, int]]


class Recording(NamedTuple):
    """The part of a recording between two moments.

    :ivar end: the last moment, in microseconds from the first
    :ivar milestones: the ends of rank 0's steps, at which two recordings of one script are in step
    """

    lanes: list[Lane]
    messages: list[Message]
    end: int
    milestones: list[int]


def read(folder: Path, window: tuple[str, int, str, int]) -> Recording:
    """Read what the processes wrote.

    :param window: from the first start of the n-th span of one name to the last end of the m-th span of another, each counted in its
        lane; empty names stand for the first and the last moment. The spans of the other name end at milestones
    """
    events = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    events.sort(key=operator.itemgetter("t"))
    ends = {(event["pid"], event["end"]): event for event in events if "end" in event}
    last = {event["pid"]: {"t": event["t"]} for event in events}  # where the spans of a killed process end
    started: dict[str, list[int]] = defaultdict(list)  # the processes of a name, one after the other
    lanes: dict[str, Lane] = {}
    sent_and_received: dict[tuple[str, str], tuple[list[Span], list[Span]]] = defaultdict(lambda: ([], []))
    for event in events:
        now, pid, process = event["t"], event["pid"], event["process"]
        attempts = started[process]
        if pid not in attempts:
            attempts.append(pid)
        if attempt := attempts.index(pid):
            process += f", attempt {attempt + 1}"
        name = ", ".join(filter(None, (process, event["lane"])))
        lane = lanes.setdefault(name, Lane(name, [], []))
        if "line" in event:
            lane.lines.append((now, event["file"], event["line"]))
        elif "begin" in event:
            over = ends.get((pid, event["begin"]), last[pid])
            note = over.get("note") or event["note"]
            around = [span.name for span in lane.spans if span.end > now]
            if event["name"] == "forward" and "forward" in around:
                continue  # of a layer
            span = Span(now, over["t"], event["name"], note, event["bytes"], len(around))
            lane.spans.append(span)
            peer = f"rank {event['peer']}"
            if span.name == "isend":
                sent_and_received[process, peer][0].append(span)
            elif span.name == "irecv":
                sent_and_received[peer, process][1].append(span)
    messages = [
        Message(sent.start, received.end, *pair, sent.nbytes)
        for pair, spans in sent_and_received.items()
        for sent, received in zip(*spans, strict=False)
    ]
    first, first_count, final, final_count = window
    begin = min((span.start for span in _nth(lanes, first, first_count)), default=events[0]["t"])
    end = max((span.end for span in _nth(lanes, final, final_count)), default=events[-1]["t"])
    return _cut(lanes, messages, begin, end, final)


def _nth(lanes: dict[str, Lane], name: str, count: int) -> list[Span]:
    """The n-th span of a name in each lane that has so many."""
    named = [[span for span in lane.spans if span.name == name] for lane in lanes.values()]
    return [spans[count - 1] for spans in named if len(spans) >= count]


def _cut(lanes: dict[str, Lane], messages: list[Message], begin: int, end: int, milestone: str) -> Recording:
    """Cut out the part between two moments, with times from the first. Lanes of a process stand together, its main thread first."""
    kept = []
    for name in sorted(lanes):
        spans = [
            span._replace(start=max(span.start, begin) - begin, end=min(span.end, end) - begin)
            for span in lanes[name].spans
            if span.start < end and span.end > begin
        ]
        lines = [(moment - begin, file, line) for moment, file, line in lanes[name].lines if begin <= moment <= end]
        if spans or lines:
            kept.append(Lane(name, spans, lines))
    inside = [
        message._replace(start=message.start - begin, end=message.end - begin)
        for message in messages
        if message.start >= begin and message.end <= end
    ]
    milestones = [span.end for span in kept[0].spans if span.name == milestone and span.start > 0]
    return Recording(kept, inside, end - begin, milestones)
