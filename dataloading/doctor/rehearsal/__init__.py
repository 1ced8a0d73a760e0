"""Other settings for the loader of a script, within the script's own loop and put in from outside.

It has two modes. In a *rehearsal*, the loader goes on for ever: its batches come, in turns, from copies of it with other settings,
and the script trains on them meanwhile. So a setting is measured while training uses the cores that workers would like to have. In a
*check*, the loader is made with one setting, and the times of its epochs are told.

The doctor asks for turns over a socket. This package is loaded in the script's processes: it imports torch alone.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import sysconfig
import time
from collections.abc import Generator, Iterator
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from .settings import Setting, changed, facts_of, loader_turn, put_in
from .turn import NoTurn, one_line

ADDRESS_VARIABLE = "LOADER_DOCTOR_ADDRESS"
PLACE_VARIABLE = "LOADER_DOCTOR_PLACE"  # file:line that makes the loader
SETTING_VARIABLE = "LOADER_DOCTOR_SETTING"  # of a check, as JSON; without it, this is a rehearsal
LIMIT_VARIABLE = (
    "LOADER_DOCTOR_LIMIT_S"  # seconds for a batch of a rehearsal; seconds of a check's epoch that are timed
)

_START = os.getcwd()  # to which the script's own path is relative
_HERE = Path(__file__).resolve().parent
_FOREIGN = _HERE.parents[2] / "common" / "foreign_script"
_LIBRARIES = {Path(sysconfig.get_path("stdlib")).resolve(), _HERE, _HERE.parent / "watch", _FOREIGN}
_PACKAGES = ("site-packages", "dist-packages")


def install() -> None:
    """Take the place of ``DataLoader``'s constructor and iterator. torch has been imported; the script has made no loader yet."""
    if ADDRESS_VARIABLE in os.environ:
        _Loader(os.environ[PLACE_VARIABLE], float(os.environ[LIMIT_VARIABLE]))


class _Loader:
    """The loader that a line of the script makes; also the copy of it that Accelerate or Lightning makes."""

    def __init__(self, place: str, limit_s: float) -> None:
        self._place, self._limit_s = place, limit_s
        self._setting: Setting | None = json.loads(os.environ.get(SETTING_VARIABLE, "null"))
        self._datasets: dict[int, str] = {}  # where the first loader over each data set was made
        self._doctor: Connection | None = None
        self._turns: Iterator[Any] = iter(())
        self._interrupted = False
        self._make, self._begin = DataLoader.__init__, DataLoader.__iter__
        own = self

        @functools.wraps(self._make)
        def make(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
            own._make(loader, *args, **kwargs)
            own._made(loader)

        @functools.wraps(self._begin)
        def begin(loader: DataLoader[Any]) -> Any:
            if vars(loader).get("_doctor_place") != own._place or get_worker_info():
                return own._begin(loader)
            return own._rehearse(loader) if own._setting is None else own._epoch(loader)

        DataLoader.__init__ = make  # type: ignore[method-assign]
        DataLoader.__iter__ = begin  # type: ignore[method-assign]

    def _made(self, loader: DataLoader[Any]) -> None:
        copies = id(loader.dataset) in self._datasets and not _is_own(sys._getframe(2).f_code.co_filename)
        place = self._datasets[id(loader.dataset)] if copies else _where()
        if place == self._place and self._setting is not None and not copies:
            put_in(loader, self._setting)
        self._datasets[id(loader.dataset)] = vars(loader)["_doctor_place"] = place

    def _connect(self, loader: DataLoader[Any]) -> Connection:
        if self._doctor is None:
            self._doctor = Client(os.environ[ADDRESS_VARIABLE])
            self._doctor.send({"ranks": int(os.environ.get("WORLD_SIZE", 1)), **facts_of(loader)})
        return self._doctor

    def _rehearse(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """All iterators of the loader give the batches of one endless generator."""
        if self._doctor is None:
            self._turns = self._take_turns(loader, self._connect(loader))
        self._interrupted = True
        # No "yield from", which ends the generator when the script leaves its loop.
        for batch in self._turns:  # noqa: UP028
            yield batch

    def _take_turns(self, loader: DataLoader[Any], doctor: Connection) -> Iterator[Any]:
        kept: dict[str, DataLoader[Any]] = {}
        while True:
            try:
                setting, counted = doctor.recv()
            except EOFError:  # the doctor has ended
                os._exit(1)
            name = json.dumps(setting)
            twin = kept.pop(name, None) or changed(loader, setting)
            try:
                turn = yield from self._turn(twin, counted)
            except Exception as error:
                doctor.send({"error": str(error) if isinstance(error, NoTurn) else one_line(error)})
                continue
            if twin.persistent_workers and not isinstance(twin.dataset, IterableDataset):
                kept[name] = twin
            doctor.send(dataclasses.asdict(turn))

    def _turn(self, twin: DataLoader[Any], counted: int) -> Any:
        return loader_turn(
            twin, counted, begin=self._begin, patience_s=self._limit_s, interrupted=self._was_interrupted
        )

    def _was_interrupted(self) -> bool:
        was, self._interrupted = self._interrupted, False
        return was

    def _epoch(self, loader: DataLoader[Any]) -> Generator[Any, None, None]:
        """An epoch of the loader; its time is told at its end, when it has taken too long, or when the script leaves it."""
        doctor = self._connect(loader)
        began, steps, waited, ended = time.perf_counter(), 0, 0.0, False
        iterator = self._begin(loader)
        try:
            while time.perf_counter() - began < self._limit_s:
                asked = time.perf_counter()
                batch = next(iterator, iterator)
                waited += time.perf_counter() - asked
                if batch is iterator:
                    ended = True
                    return
                steps += 1
                yield batch
                del batch
        finally:
            epoch = {"seconds": time.perf_counter() - began, "steps": steps, "waited": waited, "ended": ended}
            doctor.send(epoch)
        yield from iterator


def _where() -> str:
    """``file:line`` of the innermost line of the script that leads to the present call."""
    frame = sys._getframe(1)
    while frame is not None:
        if _is_own(frame.f_code.co_filename):
            return f"{os.path.join(_START, frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@functools.cache
def _is_own(file: str) -> bool:
    """Whether a file is the script's, and no library's."""
    if file.startswith("<"):
        return False
    path = Path(file).resolve()
    return not any(part in _LIBRARIES or part.name in _PACKAGES for part in (path, *path.parents))
