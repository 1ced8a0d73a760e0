"""A ``DataLoader`` whose processes record what they do, and the trace of one run.

The batch's number travels with its keys, its items and the batch itself (:class:`Numbered`). Otherwise a worker could not
know it, and with ``in_order=False`` the main process could not either.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from common.data.loaders import start_worker
from common.reporting.spans import Recorder, Span
from dataloading.dataset.batches import collate
from dataloading.dataset.lfw import LFWDataset

MAIN = "main process"  # its lane


class Numbered(NamedTuple):
    """A batch's keys, its items, or the batch itself."""

    number: int
    content: Any


class TracedFetch(Dataset[Any]):
    """The data set of torch's ``DataLoader``, whose worker calls ``__getitems__`` once per batch.

    :param late: the number of the batch whose first file is late
    :param delay_s: of that file
    """

    def __init__(self, dataset: LFWDataset, recorder: Recorder, late: int, delay_s: float) -> None:
        self._dataset, self._recorder, self._late, self._delay_s = dataset, recorder, late, delay_s

    def __getitems__(self, keys: Numbered) -> Numbered:
        with self._recorder.within(batch=keys.number), self._recorder.span("fetch"):
            if keys.number == self._late:
                with self._recorder.span("late"):
                    time.sleep(self._delay_s)
            return Numbered(keys.number, [self._dataset[key] for key in keys.content])


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


class BatchTimes(NamedTuple):
    """The times of a batch, in seconds from the run's start.

    :param number: counts from 0
    :param lane: of the worker that made it
    :param began: when the worker began with it
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
    :param late: the number of the batch with a late file
    """

    name: str
    title: str
    spans: list[Span]
    late: int

    @cached_property
    def lanes(self) -> list[str]:
        """The main process first, then the workers by their name."""
        return [MAIN, *sorted({span.lane for span in self.spans} - {MAIN})]

    def named(self, name: str) -> list[Span]:
        """The spans of this name."""
        return [span for span in self.spans if span.name == name]

    @cached_property
    def batches(self) -> list[BatchTimes]:
        """In the order in which the main process took them."""
        fetched, collated = ({span.facts["batch"]: span for span in self.named(name)} for name in ("fetch", "collate"))
        taken = [(wait.facts["batch"], wait.end) for wait in self.named("wait")]
        return [BatchTimes(n, fetched[n].lane, fetched[n].start, collated[n].end, end) for n, end in taken]

    @property
    def end(self) -> float:
        """When the main process has finished the last batch."""
        return max(span.end for span in self.named("consume"))

    @property
    def waited(self) -> float:
        """Seconds that the main process spent without a batch to work on."""
        return self.end - sum(span.seconds for span in self.named("consume"))
