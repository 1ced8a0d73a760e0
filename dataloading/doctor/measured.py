"""Reads what the watch has written: for each loader, by the line that made it, its batches, its workers and their profiles."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]
LOADING = ("getitem", "collate")
WAITS = ("iterator", "batch", "end")
RESIDENT, PRIVATE = 0, 1  # of a look at a process's memory
MATTERS, OF_ALL = 0.1, 0.01  # share of a loader's loop that is waited for it, and of all loops


class Place(NamedTuple):
    """A line of the script, and the innermost function that it calls; each is empty if there is none."""

    phase: str
    line: str
    function: str


@dataclass
class Process:
    """A worker of a loader, or the main process.

    :ivar slot: its number among the loader's workers
    :ivar profile: see ``watch/sampling.py``; empty if it has written none
    """

    slot: int
    events: list[Event]
    profile: Event

    def all(self, *kinds: str) -> list[Event]:
        """The events of these kinds."""
        return [event for event in self.events if event["kind"] in kinds]

    @property
    def busy(self) -> float:
        """The share of the time from its first batch to its last in which it made batches."""
        fetches = self.all("fetch")
        if len(fetches) < 2:
            return 0.0
        seconds = sum(map(seconds_of, fetches)) + sum(event["seconds"] for event in self.all("sent"))
        return min(1.0, float(seconds / (fetches[-1]["ended"] - fetches[0]["began"])))

    def growth(self, kind: int) -> float:
        """Bytes by which its memory has grown.

        :param kind: :data:`RESIDENT`, or :data:`PRIVATE` for what no other process shares
        """
        memory = self.profile.get("memory", [])
        return float(memory[-1][kind] - memory[0][kind]) if memory else 0.0


@dataclass
class Loader:
    """All that is known of the loaders that one line has made.

    :ivar facts: see ``watch/dataset.py``
    :ivar mains: the process that iterates over it; again for each loader of the line
    :ivar workers: the same, if there are none
    :ivar all_loops_s: seconds of the loops of all loaders
    """

    facts: Event
    mains: list[Process] = field(default_factory=list)
    workers: list[Process] = field(default_factory=list)
    all_loops_s: float = 0.0

    def all(self, *kinds: str) -> list[Event]:
        """The events of the main process of these kinds."""
        return [event for main in self.mains for event in main.all(*kinds)]

    def of_workers(self, *kinds: str) -> list[Event]:
        """The events of the workers of these kinds."""
        return [event for worker in self.workers for event in worker.all(*kinds)]

    @property
    def line(self) -> str:
        return str(self.facts["line"])

    @property
    def wait_s(self) -> float:
        """Seconds in which the main process waited for it."""
        return sum(map(seconds_of, self.all(*WAITS)))

    def epochs(self) -> list[tuple[int, float]]:
        """Batches and seconds of each iteration."""
        found: list[tuple[int, float]] = []
        for main in self.mains:  # each process numbers its iterators
            steps = Counter(event["iterator"] for event in main.all("batch"))
            ends = {event["iterator"]: event["ended"] for event in main.all(*WAITS)}
            began = {event["iterator"]: event["began"] for event in main.all("iterator")}
            found += [(steps[iterator], ends[iterator] - began[iterator]) for iterator in began]
        return found

    @property
    def loop_s(self) -> float:
        """Seconds of all iterations."""
        return sum(seconds for _, seconds in self.epochs())

    @property
    def share(self) -> float:
        """The share of the loop in which the main process waited for this loader."""
        return self.wait_s / (self.loop_s or 1.0)

    @property
    def matters(self) -> bool:
        """Whether waiting for it takes a part of its loop, and of the script's time."""
        return self.share >= MATTERS and self.wait_s >= OF_ALL * self.all_loops_s

    @property
    def steady_share(self) -> float:
        """The same without the waits for the first batches of workers."""
        starts = sum(self.starts()) if self.facts["workers"] else 0.0
        return (self.wait_s - starts) / (self.loop_s or 1.0)

    def starts(self) -> list[float]:
        """Seconds from each start of workers to the first batch."""
        found: list[float] = []
        for main in self.mains:
            first = {event["iterator"]: event["ended"] for event in reversed(main.all("batch"))}
            fresh = (event for event in main.all("iterator") if not event["reused"] and event["iterator"] in first)
            found += [first[event["iterator"]] - event["began"] for event in fresh]
        return found

    def per_batch(self) -> dict[str, float]:
        """Mean seconds that a batch takes in each stage: the first three in a worker."""
        fetches = self.of_workers("fetch")
        collate = mean(event["collate"] for event in fetches)
        return {
            "__getitem__": mean(map(seconds_of, fetches)) - collate,
            "collate": collate,
            "IPC out": mean(event["seconds"] for event in self.of_workers("sent")),
            "IPC in": mean(event["received"] for event in self.all("batch")),
        }

    def bytes_per_batch(self, name: str = "bytes") -> float:
        """Mean of the batches that were looked at."""
        return mean(event[name] for event in self.all("batch") if name in event)

    def hottest(self, *phases: str) -> list[tuple[Place, float]]:
        """Lines of the script and what they call, with their shares of these phases, the largest first."""
        found = defaultdict[Place, float](float)
        for worker in self.workers:
            for *place, seconds in worker.profile.get("seconds", []):
                found[Place(*place)] += seconds * (place[0] in phases)
        total = sum(found.values()) or 1.0
        return [(place, found[place] / total) for place in sorted(found, key=found.__getitem__, reverse=True)]

    def hottest_line(self, *phases: str) -> tuple[str, float]:
        """The line of the script in which these phases are most of the time, and its share; empty if they are in none."""
        lines = defaultdict[str, float](float)
        for place, share in self.hottest(*phases):
            lines[place.line] += share * bool(place.line)
        return max(((line, share) for line, share in lines.items() if share), key=lambda one: one[1], default=("", 0.0))


def seconds_of(event: Event) -> float:
    """From its beginning to its end."""
    return float(event["ended"] - event["began"])


def mean(values: Iterable[float]) -> float:
    """Their mean; 0 of none."""
    return statistics.fmean(kept) if (kept := list(values)) else 0.0


def read(directory: Path) -> list[Loader]:
    """The loaders of all processes, those first that were waited for most."""
    # A process that was killed may have left a part of its last line.
    events = {
        int(path.stem): [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        for path in directory.glob("*.events")
    }
    profiles = {int(path.stem): json.loads(path.read_text()) for path in directory.glob("*.profile")}
    loaders = dict[str, Loader]()
    for process, every in events.items():
        profile = profiles.get(process, {"seconds": []})
        for facts in (event for event in every if event["kind"] == "loader"):
            loader, number = loaders.setdefault(facts["line"], Loader(facts)), facts["loader"]
            seconds = [rest for of, *rest in profile["seconds"] if of == number]
            main = Process(0, [event for event in every if event.get("loader") == number], {"seconds": seconds})
            loader.mains.append(main)
            slots = {pid: slot for event in main.all("iterator") for slot, pid in enumerate(event["workers"])}
            loader.workers += [_worker(slot, events.get(pid, []), profiles.get(pid)) for pid, slot in slots.items()]
            loader.workers += [] if slots else [main]
    found = [loader for loader in loaders.values() if loader.all("iterator")]
    for loader in found:
        loader.all_loops_s = sum(one.loop_s for one in found)
    return sorted(found, key=lambda loader: -loader.wait_s)


def _worker(slot: int, events: list[Event], profile: Event | None) -> Process:
    """The profile of a worker tells no loaders apart."""
    return Process(slot, events, {**profile, "seconds": [rest for _, *rest in profile["seconds"]]} if profile else {})
