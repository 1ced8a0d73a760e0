"""Other settings for the loader of a script, within the script's own loop.

The loader goes on for ever: its batches come, in turns, from copies of it with other settings, and the script trains on them
meanwhile. So a setting is measured while training uses the cores that workers would like to have.

The doctor asks for turns over a socket. Nothing else of this project is imported, see :mod:`dataloading.doctor.watch`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import Client
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from .events import made_at
from .settings import Twins, facts_of
from .turn import NoTurn

PLACE = os.environ["LOADER_DOCTOR_PLACE"]  # file:line that makes the loader
PATIENCE_S = float(os.environ["LOADER_DOCTOR_PATIENCE_S"])  # for a batch
_make, _begin = DataLoader.__init__, DataLoader.__iter__


@functools.wraps(_make)  # Lightning reads its signature
def make(self: DataLoader[Any], dataset: Any, *args: Any, **kwargs: Any) -> None:
    """A loader that a library makes for the data set of one of the script's loaders counts as that loader."""
    vars(self)["_doctor_line"] = made_at(self, dataset, sys._getframe(1))
    _make(self, dataset, *args, **kwargs)


def begin(self: DataLoader[Any]) -> Any:
    """The iterators of other loaders are as they were."""
    if vars(self).get("_doctor_line") != PLACE or get_worker_info():
        return _begin(self)
    return rehearsal.batches(self)


class _Rehearsal:
    """All iterators of the loader give the batches of one endless generator."""

    def __init__(self) -> None:
        self._turns: Iterator[Any] | None = None
        self._interrupted = False

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        if self._turns is None:
            self._turns = self._take_turns(loader)
        self._interrupted = True
        # No "yield from", which ends the generator when the script leaves its loop.
        for batch in self._turns:  # noqa: UP028
            yield batch

    def _take_turns(self, loader: DataLoader[Any]) -> Iterator[Any]:
        twins, connection = Twins(loader), Client(os.environ["LOADER_DOCTOR_ADDRESS"])
        connection.send(facts_of(loader))
        while True:
            try:
                setting, counted = connection.recv()
            except EOFError:  # the doctor has ended
                os._exit(1)
            turn = twins.turn(setting, counted, begin=_begin, patience_s=PATIENCE_S, interrupted=self._was_interrupted)
            try:
                measured = yield from turn
            except NoTurn as error:
                connection.send({"error": str(error)})
            else:
                connection.send(dataclasses.asdict(measured))

    def _was_interrupted(self) -> bool:
        was, self._interrupted = self._interrupted, False
        return was


rehearsal = _Rehearsal()
DataLoader.__init__ = make  # type: ignore[method-assign]
DataLoader.__iter__ = begin  # type: ignore[method-assign]
