"""The events that the processes of an audited script wrote down, by rank, and in parts that end with an optimizer step."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ddp.audit.watch.event_types import (
    Backward,
    Batch,
    BeforeStep,
    Clip,
    Event,
    Group,
    JoinBegins,
    LoaderBegins,
    LoaderEnds,
    Loss,
    Names,
    NotWatched,
    Probes,
    Process,
    Scale,
    Skipped,
    Stepped,
    Unscale,
    WatchError,
    Worker,
    from_line,
)

E = TypeVar("E", bound=Event)
T = TypeVar("T")


@dataclass
class Events:
    """Events of a process, in their order."""

    events: list[Event]

    def all(self, *kinds: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kinds)]

    def last(self, *kinds: type[E]) -> E | None:
        return next((event for event in reversed(self.events) if isinstance(event, kinds)), None)

    @property
    def scale(self) -> float:
        """The factor by which the scaler has multiplied the loss."""
        last = self.last(Scale)
        return last.scale if last else 1.0


@dataclass
class Step(Events):
    """The events that led to one optimizer step, and the step itself: all events of the rank since the step before of any optimizer.

    Backward passes, clippings and scalings that belong to this step come first if they were before that one; those of other parameters
    are left out.

    :ivar passes: the backward passes whose gradients the optimizer takes: those since its parameters' gradients were cleared
    :ivar losses: those of these passes
    """

    passes: list[Backward] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)

    def end(self, since: list[Event]) -> None:
        """The step is complete.

        :param since: all events of the rank since the optimizer's step before
        """
        own, window, losses = set(self.own), set(self.events), list[Loss]()
        # No pass computes those of shards.
        touching = [one for one in Events(since).all(Backward) if own & one.computed.keys()] or self.all(Backward)
        anew = [
            i for i, one in enumerate(touching) if one.computed and not any(any(one.before.get(n, ())) for n in own)
        ]
        self.passes = touching[max(anew, default=0) :]
        self.events = []
        for event in since:
            is_own = event in window
            if isinstance(event, Loss):
                losses.append(event)
            elif isinstance(event, Backward):
                self.losses += losses if event in self.passes else []
                losses = []
                is_own = event in self.passes or (is_own and event in touching)
            elif isinstance(event, (Clip, Unscale)):
                is_own = not own.isdisjoint(event.parameters) or (is_own and not event.parameters)
            elif isinstance(event, Scale):
                is_own |= not window.issuperset(self.passes)
            self.events += [event] if is_own else []

    @property
    def computed(self) -> list[Probes]:
        """For each pass the gradients that the rank computed by itself; empty where they were not looked at."""
        return [one.computed for one in self.passes]

    @property
    def number(self) -> int:
        return self.events[-1].step

    @property
    def before(self) -> BeforeStep:
        """The gradients with which the optimizer's step begins."""
        return self.all(BeforeStep)[-1]

    @property
    def after(self) -> Stepped:
        return self.all(Stepped)[-1]

    @property
    def has_closure(self) -> bool:
        """Whether the optimizer itself has called for backward passes, as LBFGS does."""
        return any(isinstance(event, Backward) for event in self.events[self.events.index(self.all(BeforeStep)[0]) :])

    @property
    def own(self) -> list[str]:
        """The numbers of the optimizer's parameters."""
        return list(self.before.own)


@dataclass
class RankTrace(Events):
    """The events of a rank.

    :ivar workers: those of each of its loader workers
    :ivar steps: those that were completed
    """

    rank: int
    workers: list[Events]
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        step = Step([])
        stepped = dict[
            tuple[str, ...], int
        ]()  # by an optimizer's parameters, how many events there were at its latest step
        for count, event in enumerate(self.events, 1):
            step.events.append(event)
            if isinstance(event, Stepped) and step.all(BeforeStep):  # of nested optimizers, the outer one ends later
                own = tuple(step.own)
                step.end(self.events[stepped.get(own, 0) : count])
                stepped[own] = count
                self.steps.append(step)
                step = Step([])
            elif isinstance(event, Skipped):  # the scaler left a step with inf out
                step = Step([])

    @functools.cached_property
    def epochs(self) -> list[Epoch]:
        """All iterations over loaders, in order."""
        return _epochs(self.events)

    @functools.cached_property
    def training(self) -> list[Epoch]:
        """Those that train."""
        return [epoch for epoch in self.epochs if epoch.trains]

    @functools.cached_property
    def training_iterators(self) -> set[int]:
        """The numbers of the iterators over loaders that train."""
        return {epoch.begin.iterator for epoch in self.training}


@dataclass
class Epoch:
    """One iteration over a loader.

    :ivar begin: the event of its begin
    :ivar batches: those that were taken
    :ivar trains: whether a backward pass followed a batch
    :ivar ended: whether one more than the last batch was asked for
    :ivar after: the events that follow the last batch, up to the next epoch
    """

    begin: LoaderBegins
    batches: list[Batch] = field(default_factory=list)
    trains: bool = False
    ended: bool = False
    after: list[Event] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether all batches were taken. Lightning counts them, and asks for no other."""
        return self.ended or len(self.batches) == self.begin.batches

    @property
    def samples(self) -> list[int]:
        """The numbers of all samples, in order; empty if they are not known."""
        if any(batch.indices is None for batch in self.batches):
            return []
        return [sample for batch in self.batches for sample in batch.indices or ()]

    @property
    def rows(self) -> list[int]:
        """The checksums of all samples that arrived."""
        return [row for batch in self.batches for row in batch.rows]

    def numbered(self, targets: bool = False) -> set[tuple[int, int]]:
        """The numbers of all samples, each with its checksum or that of its target, where they are known."""
        return {
            pair
            for batch in self.batches
            for pair in zip(batch.indices or (), batch.targets if targets else batch.rows, strict=False)
        }


def _epochs(events: Iterable[Event]) -> list[Epoch]:
    found: dict[int, Epoch] = {}
    drawn, once = Counter[int](), set[int]()  # batches since the last backward pass; the loaders with one before that
    latest = None
    for event in events:
        if isinstance(event, LoaderBegins):
            latest = found[event.iterator] = Epoch(event)
        elif isinstance(event, Batch) and event.iterator in found:
            latest = found[event.iterator]
            latest.batches.append(event)
            latest.after.clear()
            drawn[event.iterator] += 1
        elif isinstance(event, LoaderEnds) and event.iterator in found:
            found[event.iterator].ended = True
        elif latest is not None:
            latest.after.append(event)
            if isinstance(event, Backward) and drawn:
                # A loader trains if it gives one batch to each pass. An evaluation takes more, or ends, or comes now and then.
                # Another pass, without a batch of its own, belongs to the one before.
                before, once = once, {number for number in drawn if drawn[number] == 1 and not found[number].ended}
                for number in before & once:
                    found[number].trains = True
                latest.trains |= not (latest.ended and once)
                drawn.clear()
    return [epoch for epoch in found.values() if epoch.batches]


@dataclass
class Trace:
    """A run of a script.

    :ivar ranks: the traces of those that made a process group, by rank
    :ivar errors: of the audit itself
    :ivar names: of the parameters, by number
    :ivar not_watched: names of what this torch does not have
    """

    ranks: list[RankTrace]
    errors: list[str]
    names: dict[str, str]
    not_watched: list[str] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def steps(self) -> Iterator[list[Step]]:
        """Each optimizer step, as all ranks took it; none under ``join``, where ranks do not take the same steps."""
        if not any(rank.all(JoinBegins) for rank in self.ranks):
            for steps in paired([[(step.before.where, step) for step in rank.steps] for rank in self.ranks]):
                if not any(step.has_closure for step in steps):
                    yield list(steps)

    def epochs(self, train: bool) -> Iterator[tuple[Epoch, ...]]:
        """Each iteration over a loader, as all ranks made it: those of training, or those of evaluations."""
        chosen = [[one for one in rank.epochs if one.trains == train and one.begin.evaluates] for rank in self.ranks]
        return paired([[(one.begin.where, one) for one in of_rank] for of_rank in chosen])


def together(parts: Iterable[RankTrace | Step], kind: type[E]) -> Iterator[tuple[E, ...]]:
    """The events of this kind that all ranks have: at the same line, the first there, then the second there, and so on.

    :param parts: of each rank, its whole trace or a step
    """
    return paired([[(event.where, event) for event in part.all(kind)] for part in parts])


def paired(of_ranks: Iterable[Iterable[tuple[str, T]]]) -> Iterator[tuple[T, ...]]:
    """The things that all ranks have, each given with its line, in the order of rank 0: one that a rank does alone shifts no others."""
    numbered: list[dict[tuple[str, int], T]] = []
    for things in of_ranks:
        counts = Counter[str]()
        numbered.append({})
        for where, thing in things:
            numbered[-1][where, counts[where]] = thing
            counts[where] += 1
    for key in numbered[0]:
        if all(key in of_rank for of_rank in numbered):
            yield tuple(of_rank[key] for of_rank in numbered)


def read(directory: Path, ranks: int) -> Trace:
    """The trace that the processes of a run on so many ranks have written into a folder.

    On one rank a script may make no process group. Then rank 0 is the process that trains.
    """
    processes = [Events(_events(path)) for path in directory.glob("*.jsonl")]
    errors = [event.text for process in processes for event in process.all(WatchError)]
    found, names = dict[int, RankTrace](), dict[str, str]()
    for process in processes:
        group, own = process.last(Group), process.last(Process)
        rank = group.rank if group else None
        if ranks == 1 and process.all(Stepped):
            rank = 0
        if own and rank is not None and rank not in found:
            children = [other for other in processes if any(one.parent == own.pid for one in other.all(Process)[-1:])]
            workers = [child for child in children if child.all(Worker)]
            found[rank] = RankTrace(process.events, rank, workers)
            for event in process.all(Names):
                names |= event.names
    not_watched = sorted({event.name for process in processes for event in process.all(NotWatched)})
    return Trace([found[rank] for rank in sorted(found)], errors, names, not_watched)


def _events(path: Path) -> list[Event]:
    """A process that was killed may have written a part of its last line."""
    lines = path.read_text().splitlines(keepends=True)
    return [from_line(line) for line in lines if line.endswith("\n")]
