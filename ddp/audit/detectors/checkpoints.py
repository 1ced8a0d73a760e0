"""A checkpoint holds the state of one step, and is written by one rank."""

from __future__ import annotations

from ddp.audit.finding import Finding, Findings
from ddp.audit.trace import RankTrace, Trace
from ddp.audit.watch.event_types import Checksums, Event, Load, Rename, Save, Stepped


def detect(trace: Trace) -> Findings:
    yield from _writers(trace)
    for rank in trace.ranks:
        for event in rank.all(Save):
            if event.live:
                yield Finding("later-weights", event, rank=rank.rank)
        yield from _swapped(rank)


def _writers(trace: Trace) -> Findings:
    writers: dict[tuple[str, int], dict[int, Event]] = {}
    for rank in trace.ranks:
        saved = {event.step for event in rank.all(Save)}  # also to streams, which may be parts of a file
        for event in rank.all(Save, Rename):
            if event.path and event.step in saved:
                writers.setdefault((event.path, event.step), {}).setdefault(rank.rank, event)
    for (path, _), ranks in writers.items():
        if len(ranks) > 1:
            yield Finding(
                "written-by-several-ranks",
                ranks[min(ranks)],
                f"ranks {sorted(ranks)} write {path} at the same step: the file holds whichever was last, or parts of several",
            )
            return


def _swapped(rank: RankTrace) -> Findings:
    """Weights that no optimizer step has left, saved with the optimizer and trained on after a load."""
    averaged: dict[str, Event] = {}
    latest: Checksums | None = None
    for event in rank.events:
        if isinstance(event, Stepped):
            latest = event.parameters
        elif isinstance(event, Save) and latest and event.path and {"model", "optimizer"} <= set(event.states):
            if not set(latest.values()) <= set(event.checksums):
                averaged[event.path] = event
        elif isinstance(event, Load) and event.path in averaged and event.step < len(rank.steps):
            yield Finding("resumed-from-average", averaged[event.path], rank=rank.rank)
            return
