"""Tracing: spans of time from every process and thread of a loader, on one clock.

The clock is ``time.perf_counter``, which on Linux is CLOCK_MONOTONIC. It counts from the machine's start in all processes, so
spans of several processes need no alignment. A span costs a tuple in a list. Each thread writes its list to its own file when
a batch is finished, since ``DataLoader`` may terminate a worker without running its exit handlers.

The batch's number travels with its keys, its items and the batch itself (:class:`Numbered`). Otherwise a worker could not
know it, and with ``in_order=False`` the main process could not either.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from common.data.datasets import BatchKey
from common.data.loaders import start_worker
from common.reporting.trace_events import Event, Lane, at, complete, lane_names
from dataloading.dataset.batches import LFWBatches, collate
from dataloading.dataset.decoders import Pixels
from dataloading.dataset.lfw import LFWDataset


class Span(NamedTuple):
    """A stage of a thread's work; start and end in seconds."""

    name: str
    start: float
    end: float
    lane: Lane
    lane_name: str
    batch: int | None


class Tracer:
    """Records spans. Workers get a copy by fork or by pickle, and all copies write to the same folder.

    :param folder: an existing folder, which must stay until :meth:`collect`; each thread makes a file there
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._local = _Thread()

    def span(self, name: str) -> AbstractContextManager[None]:
        """A context manager that records its block, for ``LFWDataset.span``."""
        return _Timed(self, name)

    def record(self, name: str, start: float, end: float, batch: int | None = None) -> None:
        """Record a span with known times.

        :param batch: when None, the number of the surrounding :meth:`batch`, if any
        """
        mine = self._mine()
        mine.spans.append((name, start, end, mine.batch if batch is None else batch))

    @contextlib.contextmanager
    def batch(self, number: int) -> Iterator[None]:
        """Assign what this thread records in the block to this batch, and write it at the end."""
        mine = self._mine()
        mine.batch = number
        try:
            yield
        finally:
            mine.batch = None
            self.flush()

    @property
    def current_batch(self) -> int | None:
        """The number of the batch that this thread works on."""
        return self._mine().batch

    def flush(self) -> None:
        """Write what this thread has recorded."""
        mine = self._mine()
        if mine.spans:
            name = threading.current_thread().name
            with open(self._folder / f"{mine.pid}-{threading.get_native_id()}", "ab") as file:
                file.write(pickle.dumps(((mine.pid, threading.get_native_id()), name, mine.spans)))
            mine.spans = []

    def collect(self) -> list[Span]:
        """The spans of all threads, outer ones before inner ones. Other threads must have flushed theirs."""
        self.flush()
        found = []
        for path in self._folder.iterdir():
            with open(path, "rb") as file, contextlib.suppress(EOFError, pickle.UnpicklingError):
                # The last record of a killed worker may be cut off.
                while True:
                    lane, lane_name, spans = pickle.load(file)
                    found += [Span(name, start, end, lane, lane_name, batch) for name, start, end, batch in spans]
        return sorted(found, key=lambda span: (span.start, -span.end))

    def _mine(self) -> _Thread:
        if self._local.pid != os.getpid():  # after a fork, the parent writes its own records
            self._local.pid, self._local.spans, self._local.batch = os.getpid(), [], None
        return self._local

    def __reduce__(self) -> tuple[type[Tracer], tuple[Path]]:
        return Tracer, (self._folder,)


class _Thread(threading.local):
    """The records of a thread that are not written yet."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.spans: list[tuple[str, float, float, int | None]] = []
        self.batch: int | None = None


class _Timed(AbstractContextManager[None]):
    """A context manager as a class: one made from a generator costs four times as much."""

    __slots__ = ("_name", "_start", "_tracer")

    def __init__(self, tracer: Tracer, name: str) -> None:
        self._tracer, self._name = tracer, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._tracer.record(self._name, self._start, time.perf_counter())


class Numbered(NamedTuple):
    """A batch's keys, its items, or the batch itself."""

    number: int
    content: Any


class TracedFetch(Dataset[Any]):
    """The data set of a stock ``DataLoader``, whose worker calls ``__getitems__`` once per batch.

    :param dataset: its ``span`` is set to the tracer's
    :param tracer: records the spans
    """

    def __init__(self, dataset: LFWDataset, tracer: Tracer) -> None:
        self.dataset, self.tracer = dataset, tracer

    def __getitems__(self, keys: Numbered) -> Numbered:
        with self.tracer.batch(keys.number), self.tracer.span("fetch"):
            return Numbered(keys.number, [self.dataset[key] for key in keys.content])


@dataclass(frozen=True)
class TracedCollate:
    """The stock loader's ``collate_fn``."""

    tracer: Tracer

    def __call__(self, items: Numbered) -> Numbered:
        with self.tracer.batch(items.number), self.tracer.span("collate"):
            return Numbered(items.number, collate(items.content))


@dataclass(frozen=True)
class TracedStart:
    """The stock loader's ``worker_init_fn``: records a worker's start, from ``asked`` until it runs."""

    tracer: Tracer
    asked: float

    def __call__(self, worker: int) -> None:
        start_worker(worker)
        threading.current_thread().name = f"loader worker {worker}"
        self.tracer.record("start", self.asked, time.perf_counter())
        self.tracer.flush()


class TracedBatches(LFWBatches):
    """The data set of a fast loader with threads, which call ``fill`` for one piece of a batch after the other.

    :param keys: the same objects that the loader gets, since threads recognize a batch by its key's identity
    """

    def __init__(self, files: LFWDataset, tracer: Tracer, keys: Sequence[BatchKey]) -> None:
        super().__init__(files)
        self._tracer, self._keys = tracer, keys
        self._numbers = {id(key): number for number, key in enumerate(keys)}

    def fill(self, buffer: Pixels, key: BatchKey, *part: Any, **named: Any) -> list[int]:
        with self._tracer.batch(self._numbers[id(key)]), self._tracer.span("fetch"):
            return super().fill(buffer, key, *part, **named)


class BatchTimes(NamedTuple):
    """The times of a batch, in seconds from the run's start.

    :param number: counts from 0
    :param lane: of the worker that finished it
    :param began: when its first image was opened
    :param finished: when it was collated
    :param taken: when the main process received it
    """

    number: int
    lane: Lane
    began: float
    finished: float
    taken: float


@dataclass(frozen=True)
class LoaderTrace:
    """The trace of one run. The main process's spans are ``start workers``, ``wait`` and ``consume``.

    :param name: for file names
    :param title: for people
    :param spans: in seconds from the moment when the main process requested the loader's iterator
    :param main: the main process's lane
    :param late: the number of the batch with a late file, or None
    """

    name: str
    title: str
    spans: list[Span]
    main: Lane
    late: int | None

    @cached_property
    def lanes(self) -> dict[Lane, str]:
        """The main process first, then the workers by their name."""
        names = {span.lane: span.lane_name for span in self.spans}
        workers = sorted((name, lane) for lane, name in names.items() if lane != self.main)
        return {self.main: "main process"} | {lane: name for name, lane in workers}

    @cached_property
    def waits(self) -> list[Span]:
        """When the main process waited for a batch, each with the number of the batch that came."""
        return [span for span in self.spans if span.name == "wait"]

    @cached_property
    def batches(self) -> list[BatchTimes]:
        """In the order in which the main process took them."""
        return [self._times(wait) for wait in self.waits]

    def work(self, batch: int) -> list[Span]:
        """The outermost spans of the work on a batch, in the order of their start."""
        return [span for span in self.spans if span.batch == batch and span.name in ("fetch", "collate")]

    def _times(self, wait: Span) -> BatchTimes:
        assert wait.batch is not None
        work = self.work(wait.batch)
        last = max(work, key=lambda span: span.end)
        return BatchTimes(wait.batch, last.lane, work[0].start, last.end, wait.end)

    @property
    def end(self) -> float:
        """When the main process has finished the last batch."""
        return max(span.end for span in self.spans if span.lane == self.main)

    @property
    def waited(self) -> float:
        """Seconds that the main process spent without a batch to work on."""
        return self.end - sum(span.end - span.start for span in self.spans if span.name == "consume")

    def held_up(self) -> dict[int, float]:
        """For each batch, the seconds that the main process waited for another batch although this one was finished."""
        return {
            batch.number: sum(
                max(0.0, min(batch.taken, wait.end) - max(batch.finished, wait.start))
                for wait in self.waits
                if wait.batch != batch.number
            )
            for batch in self.batches
        }

    def queue(self) -> list[tuple[float, int]]:
        """The number of batches that are finished and not yet taken, as (time of the change, number from then on)."""
        changes = [(batch.finished, 1) for batch in self.batches] + [(batch.taken, -1) for batch in self.batches]
        steps, waiting = [(0.0, 0)], 0
        for moment, change in sorted(changes, key=lambda item: (item[0], -item[1])):
            waiting += change
            steps.append((moment, waiting))
        return steps


def trace_events(run: LoaderTrace) -> list[Event]:
    """The run in Chrome's trace event format, for :func:`common.reporting.trace_events.write_trace`."""
    main_pid = run.main[0]
    events: list[Event] = []
    for position, (lane, name) in enumerate(run.lanes.items()):
        in_main = lane[0] == main_pid
        events += lane_names(lane, "main process" if in_main else name, name, 0 if in_main else position, position)
    for span in run.spans:
        facts = {} if span.batch is None else {"batch": span.batch}
        events.append(complete(span.name, span.start, span.end, span.lane, "stage", **facts))
    for moment, waiting in run.queue():
        name = "batches finished, not taken"
        events.append({**at(moment, run.main), "ph": "C", "name": name, "args": {"batches": waiting}})
    for batch in run.batches:
        # Perfetto attaches each end of an arrow to the slice around its time: the last work, and the consumer's.
        last = max(run.work(batch.number), key=lambda span: span.end)
        flow = {"name": "hand-over", "cat": "hand-over", "id": batch.number}
        events.append({**at(last.start, last.lane), **flow, "ph": "s"})
        events.append({**at(batch.taken, run.main), **flow, "ph": "f", "bp": "e"})
    return events
