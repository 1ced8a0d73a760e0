"""A loader whose processes and threads record what they do, and the trace of one run.

The batch's number travels with its keys, its items and the batch itself (:class:`Numbered`). Otherwise a worker could not
know it, and with ``in_order=False`` the main process could not either.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from common.data.datasets import BatchKey
from common.data.loaders import start_worker
from common.reporting.spans import COUNTERS, Recorder, Span
from dataloading.dataset.batches import LFWBatches, collate
from dataloading.dataset.decoders import Pixels
from dataloading.dataset.lfw import LFWDataset
from dataloading.dataset.storage import Reader, Storage

MAIN = "main process"  # its lane


class Numbered(NamedTuple):
    """A batch's keys, its items, or the batch itself."""

    number: int
    content: Any


class TracedFetch(Dataset[Any]):
    """The data set of torch's ``DataLoader``, whose worker calls ``__getitems__`` once per batch."""

    def __init__(self, dataset: LFWDataset, recorder: Recorder) -> None:
        self.dataset, self.recorder = dataset, recorder

    def __getitems__(self, keys: Numbered) -> Numbered:
        with self.recorder.within(batch=keys.number), self.recorder.span("fetch"):
            return Numbered(keys.number, [self.dataset[key] for key in keys.content])


def traced_collate(recorder: Recorder, items: Numbered) -> Numbered:
    """The ``collate_fn`` of torch's ``DataLoader``."""
    with recorder.within(batch=items.number), recorder.span("collate"):
        return Numbered(items.number, collate(items.content))


def traced_start(recorder: Recorder, asked: float, worker: int) -> None:
    """The ``worker_init_fn`` of torch's ``DataLoader``: records a worker's start, from ``asked`` until it runs."""
    start_worker(worker)
    threading.current_thread().name = f"loader worker {worker}"
    recorder.add("start", asked, time.perf_counter())
    recorder.flush()


class TracedBatches(LFWBatches):
    """The data set of a fast loader with threads, which call ``fill`` for one part of a batch after the other.

    :param keys: the same objects that the loader gets, since threads recognize a batch by its key's identity
    """

    def __init__(self, files: LFWDataset, recorder: Recorder, keys: Sequence[BatchKey]) -> None:
        super().__init__(files)
        self._recorder, self._keys = recorder, keys
        self._numbers = {id(key): number for number, key in enumerate(keys)}

    def fill(self, buffer: Pixels, key: BatchKey, *part: Any, **named: Any) -> list[int]:
        with self._recorder.within(batch=self._numbers[id(key)]), self._recorder.span("fetch"):
            return super().fill(buffer, key, *part, **named)


class LateFile:
    """A storage that delays one file when it is opened for one batch."""

    def __init__(self, storage: Storage, name: str, batch: int, delay_s: float, recorder: Recorder) -> None:
        self.root, self._storage = storage.root, storage
        self._name, self._batch, self._delay_s, self._recorder = name, batch, delay_s, recorder

    def names(self) -> list[str]:
        return self._storage.names()

    def open(self, name: str) -> Reader:
        if name == self._name and self._recorder.facts.get("batch") == self._batch:
            with self._recorder.span("late"):
                time.sleep(self._delay_s)
        return self._storage.open(name)


class BatchTimes(NamedTuple):
    """The times of a batch, in seconds from the run's start.

    :param number: counts from 0
    :param lane: of the worker that finished it
    :param began: when its first image was opened
    :param finished: when it was collated
    :param taken: when the main process received it
    """

    number: int
    lane: str
    began: float
    finished: float
    taken: float


@dataclass(frozen=True)
class LoaderTrace:
    """The trace of one run. The main process's spans are ``start workers``, ``wait`` and ``consume``.

    :param name: for file names
    :param title: for people
    :param spans: in seconds from the moment when the main process requested the loader's iterator
    :param late: the number of the batch with a late file, or None
    """

    name: str
    title: str
    spans: list[Span]
    late: int | None

    @cached_property
    def lanes(self) -> list[str]:
        """The main process first, then the workers by their name."""
        return [MAIN, *sorted({span.lane for span in self.spans} - {MAIN})]

    def named(self, name: str) -> list[Span]:
        """The spans of this name."""
        return [span for span in self.spans if span.name == name]

    @cached_property
    def work(self) -> dict[int, list[Span]]:
        """For each batch the outermost spans of the work on it, in the order of their start."""
        work: dict[int, list[Span]] = defaultdict(list)
        for span in self.spans:
            if span.name in ("fetch", "collate"):
                work[span.facts["batch"]].append(span)
        return work

    @cached_property
    def batches(self) -> list[BatchTimes]:
        """In the order in which the main process took them."""
        batches = []
        for wait in self.named("wait"):
            work = self.work[wait.facts["batch"]]
            last = max(work, key=lambda span: span.end)
            batches.append(BatchTimes(wait.facts["batch"], last.lane, work[0].start, last.end, wait.end))
        return batches

    @property
    def end(self) -> float:
        """When the main process has finished the last batch."""
        return max(span.end for span in self.named("consume"))

    @property
    def waited(self) -> float:
        """Seconds that the main process spent without a batch to work on."""
        return self.end - sum(span.seconds for span in self.named("consume"))

    def queue(self) -> list[Span]:
        """A counter of the batches that are finished and not yet taken."""
        changes = [(0.0, 0), *((b.finished, 1) for b in self.batches), *((b.taken, -1) for b in self.batches)]
        spans, waiting = [], 0
        for moment, change in sorted(changes, key=lambda item: (item[0], -item[1])):
            waiting += change
            spans.append(Span("batches finished, not taken", moment, moment, COUNTERS, {"batches": waiting}))
        return spans
