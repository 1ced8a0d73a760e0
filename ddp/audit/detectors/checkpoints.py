"""A checkpoint holds the state of one step, all of it, and is written by one rank."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ddp.audit.detectors.finding import Finding
from ddp.audit.trace import Event, RankTrace, Trace

CHAPTER = "ddp/README.md, chapter 9"


def detect(trace: Trace) -> Iterator[Finding]:
    yield from _writers(trace)
    for rank in trace.ranks:
        yield from _live(rank)
        yield from _incomplete(rank, trace)
        yield from _swapped(rank)


def _writers(trace: Trace) -> Iterator[Finding]:
    writers: dict[tuple[str, int], dict[int, Event]] = {}
    for rank in trace.ranks:
        saved = {event["step"] for event in rank.all("save")}  # also to streams, which may be parts of a file
        for event in rank.all("save", "rename"):
            if event["path"] and event["step"] in saved:
                writers.setdefault((event["path"], event["step"]), {}).setdefault(rank.rank, event)
    for (path, _), ranks in writers.items():
        if len(ranks) > 1:
            yield Finding(
                f"ranks {sorted(ranks)} write {path} at the same step: the file holds whichever was last, or parts of several",
                "Let rank 0 write what all ranks share, and each rank its own state to a file of its own",
                ranks[min(ranks)],
                CHAPTER,
            )
            return


def _live(rank: RankTrace) -> Iterator[Finding]:
    for event in rank.all("save"):
        if event["alias"] and (event["thread"] or event["torn"]):
            yield Finding(
                "a thread writes the tensors that are being trained: the file holds weights of whatever step they are at by then",
                "Copy the state before the next step, and let the thread write the copy",
                event,
                CHAPTER,
                rank.rank,
            )
            return


def _incomplete(rank: RankTrace, trace: Trace) -> Iterator[Finding]:
    """A file with the optimizer's state is meant for a resume, so it and the files beside it must have the rest too."""
    writes = [event for one in trace.ranks for event in one.all("save", "write") if event["path"]]
    used = {
        "the GradScaler's state": ("scaler", bool(rank.all("scale"))),
        "the schedule's state": ("schedule", bool(rank.all("schedule"))),
        "the number of the epoch or step": ("progress", len(rank.all("epoch")) > 0),
    }
    for event in rank.all("save"):
        if not event["path"]:
            continue  # a stream of the script's own, such as a part of a larger file
        folder = os.path.dirname(event["path"])
        beside = [one for one in writes if os.path.dirname(one["path"]) == folder and one["path"] != event["path"]]
        others = any(one["kind"] == "write" for one in beside)  # such as a JSON with the number of the step
        lacking = [
            what
            for what, (key, needed) in used.items()
            if needed and not event[key] and not others and not any(one.get(key) for one in beside)
        ]
        if event["optimizer"] and event["model"] and lacking:
            yield Finding(
                f"the checkpoint holds the model and the optimizer, and lacks {' and '.join(lacking)}",
                "Save everything that the next step depends on",
                event,
                CHAPTER,
                rank.rank,
            )
            return


def _swapped(rank: RankTrace) -> Iterator[Finding]:
    """Weights that no optimizer step has left, saved with the optimizer and trained on after a load."""
    averaged: dict[str, Event] = {}
    latest: dict[str, int] | None = None
    for event in rank.events:
        if event["kind"] == "step":
            latest = event["parameters"]
        elif event["kind"] == "save" and latest and event["path"] and event["optimizer"]:
            if not set(latest.values()) <= set(event["checksums"]):
                averaged[event["path"]] = event
        elif event["kind"] == "load" and event["path"] in averaged and event["step"] < len(rank.steps):
            saved = averaged[event["path"]]
            yield Finding(
                "the checkpoint holds other weights than the last optimizer step left, such as an average that was swapped in, and "
                "the run that is resumed trains on from them",
                "Save the weights that are trained, and the average beside them",
                saved,
                CHAPTER,
                rank.rank,
            )
            return
