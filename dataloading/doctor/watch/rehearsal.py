"""Other settings for the loader of a script, within the script's own loop and put in from outside.

It has two modes. In a *rehearsal*, the loader goes on for ever: its batches come, in turns, from copies of it with other settings,
and the script trains on them meanwhile. So a setting is measured while training uses the cores that workers would like to have. In a
*check*, the loader is made with one setting, and the times of its epochs are told.

The doctor asks for turns over a socket. Nothing else of this project is imported, see :mod:`dataloading.doctor.watch`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from .events import is_own, lines, made_at
from .settings import Setting, Twins, facts_of, put_in
from .turn import NoTurn

PLACE = os.environ["LOADER_DOCTOR_PLACE"]  # file:line that makes the loader
SETTING: Setting | None = json.loads(os.environ["LOADER_DOCTOR_SETTING"])  # of a check; None in a rehearsal
LIMIT_S = float(os.environ["LOADER_DOCTOR_LIMIT_S"])  # for a batch of a rehearsal; of a check's epoch that is timed
_make, _begin = DataLoader.__init__, DataLoader.__iter__


@functools.wraps(_make)  # Lightning reads its signature
def make(self: DataLoader[Any], dataset: Any, *args: Any, **kwargs: Any) -> None:
    """A loader that a library makes, of the data set of one of the script's, has its line, and has got its settings from it."""
    maker = sys._getframe(1)
    line = made_at(self, dataset, maker)
    _make(self, dataset, *args, **kwargs)
    if SETTING is not None and line == PLACE and (is_own(maker.f_code.co_filename) or id(dataset) not in lines):
        put_in(self, SETTING)
        if self.dataset is not dataset:
            lines[id(self.dataset)] = line
    vars(self)["_doctor_line"] = line


def begin(self: DataLoader[Any]) -> Any:
    """The loader's iterator is one of a rehearsal or a check; those of other loaders are as they were."""
    if vars(self).get("_doctor_line") != PLACE or get_worker_info():
        return _begin(self)
    return rehearsal.batches(self) if SETTING is None else _epoch(self)


class _Doctor:
    """The connection to the doctor, from the first iterator on."""

    def __init__(self) -> None:
        self._connection: Connection | None = None

    def of(self, loader: DataLoader[Any]) -> Connection:
        if self._connection is None:
            self._connection = Client(os.environ["LOADER_DOCTOR_ADDRESS"])
            self._connection.send(facts_of(loader))
        return self._connection


class _Rehearsal:
    """All iterators of the loader give the batches of one endless generator."""

    def __init__(self) -> None:
        self._turns: Iterator[Any] | None = None
        self._interrupted = False

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        if self._turns is None:
            self._turns = self._take_turns(loader, doctor.of(loader))
        self._interrupted = True
        # No "yield from", which ends the generator when the script leaves its loop.
        for batch in self._turns:  # noqa: UP028
            yield batch

    def _take_turns(self, loader: DataLoader[Any], connection: Connection) -> Iterator[Any]:
        twins = Twins(loader)
        while True:
            try:
                setting, counted = connection.recv()
            except EOFError:  # the doctor has ended
                os._exit(1)
            turn = twins.turn(setting, counted, begin=_begin, patience_s=LIMIT_S, interrupted=self._was_interrupted)
            try:
                measured = yield from turn
            except NoTurn as error:
                connection.send({"error": str(error)})
            else:
                connection.send(dataclasses.asdict(measured))

    def _was_interrupted(self) -> bool:
        was, self._interrupted = self._interrupted, False
        return was


def _epoch(loader: DataLoader[Any]) -> Iterator[Any]:
    """An epoch of the loader; its time is told at its end, when it has taken too long, or when the script leaves it."""
    connection = doctor.of(loader)
    began, steps, ended = time.perf_counter(), 0, False
    iterator = _begin(loader)
    try:
        while time.perf_counter() - began < LIMIT_S:
            batch = next(iterator, iterator)
            if batch is iterator:
                ended = True
                return
            steps += 1
            yield batch
            del batch
    finally:
        connection.send({"seconds": time.perf_counter() - began, "steps": steps, "ended": ended})
    yield from iterator


doctor, rehearsal = _Doctor(), _Rehearsal()
DataLoader.__init__ = make  # type: ignore[method-assign]
DataLoader.__iter__ = begin  # type: ignore[method-assign]
