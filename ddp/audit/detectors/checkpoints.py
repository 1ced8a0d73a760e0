"""A checkpoint holds the state of one step, all of it, and is written by one rank."""

from __future__ import annotations

import os

from ddp.audit.finding import Finding, Findings
from ddp.audit.trace import RankTrace, Trace
from ddp.audit.watch.event_types import (
    Checksums,
    Event,
    File,
    Load,
    LoaderBegins,
    Rename,
    Save,
    Scale,
    Schedule,
    Stepped,
    Write,
)

# The state that a resume needs, the event that tells that the script uses it, and how a checkpoint's event calls it.
STATES: tuple[tuple[str, type[Event], str], ...] = (
    ("the GradScaler's state", Scale, "scaler"),
    ("the schedule's state", Schedule, "schedule"),
    ("the number of the epoch or step", LoaderBegins, "progress"),
)


def detect(trace: Trace) -> Findings:
    yield from _writers(trace)
    written = [event for rank in trace.ranks for event in rank.all(Save, Write) if event.path]
    for rank in trace.ranks:
        yield from _saved(rank, written)
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


def _saved(rank: RankTrace, written: list[File]) -> Findings:
    """A file with the optimizer's state is meant for a resume, so it and the files beside it must have the rest too."""
    for event in rank.all(Save):
        if event.live:
            yield Finding("later-weights", event, rank=rank.rank)
        if not (event.path and {"optimizer", "model"} <= set(event.states)):
            continue  # without a path, it is a stream of the script's own, such as a part of a larger file
        folder = os.path.dirname(event.path)
        beside = [one for one in written if os.path.dirname(one.path or "") == folder and one.path != event.path]
        if any(isinstance(one, Write) for one in beside):
            continue  # such as a JSON with the number of the step
        lacking = [
            state
            for state, used, name in STATES
            if rank.all(used) and not any(name in one.states for one in (event, *beside) if isinstance(one, Save))
        ]
        if lacking:
            yield Finding(
                "incomplete-checkpoint",
                event,
                f"the checkpoint holds the model and the optimizer, and lacks {' and '.join(lacking)}",
                rank.rank,
            )


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
