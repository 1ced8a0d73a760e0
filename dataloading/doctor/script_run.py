"""A run of somebody's script, whose loader takes turns that this process asks for; see dataloading/doctor/rehearsal."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from common.child_processes import descendants, end_all_but
from common.foreign_script.failure import why_failed
from common.foreign_script.run import Outcome, injected, run
from dataloading.doctor.rehearsal import ADDRESS_VARIABLE, LIMIT_VARIABLE, PLACE_VARIABLE, SETTING_VARIABLE

REHEARSAL = Path(__file__).parent / "rehearsal" / "__init__.py"
START_S = 300.0  # for a script to come to its loader
GRACE_S = 30.0


class ScriptEnded(Exception):
    """The script has ended, or does not answer; the text says why."""


@dataclass(frozen=True)
class Script:
    """A script and its loader.

    :param command: as for ``common.foreign_script.run.run``
    :param environment: of its processes
    :param place: ``file:line`` that makes the loader
    :param watches: other packages to load in each process, as for ``injected``
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    place: str
    watches: tuple[Path, ...] = ()


class ScriptRun:
    """A run of a script, from entering a block to leaving it.

    :ivar facts: of its loader, from the rank that came first
    :param setting: to put in from outside; None for a rehearsal
    :param limit_s: seconds for a batch of a rehearsal; seconds of an epoch that a check times
    """

    facts: dict[str, Any]

    def __init__(self, script: Script, setting: Mapping[str, Any] | None, limit_s: float) -> None:
        self._script, self._setting, self._limit_s = script, setting, limit_s
        self._ranks: list[Connection] = []
        self._outcome: Outcome | None = None

    def __enter__(self) -> ScriptRun:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._address = os.fspath(folder / "address")
        self._listener = Listener(self._address, "AF_UNIX", backlog=16)
        self._before = descendants()
        self._thread = threading.Thread(target=self._run, args=(folder,))
        self._thread.start()
        try:
            self.facts = self._meet()
            for _ in range(1, self.facts["ranks"]):
                self._meet()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _run(self, folder: Path) -> None:
        limited = self._limit_s + START_S
        environment = {
            **self._script.environment,
            **injected(*self._script.watches, REHEARSAL),
            ADDRESS_VARIABLE: self._address,
            PLACE_VARIABLE: os.path.abspath(self._script.place),
            LIMIT_VARIABLE: str(self._limit_s),
        }
        if self._setting is not None:
            environment[SETTING_VARIABLE] = json.dumps(self._setting)
        self._outcome = run(self._script.command, environment, 10 * limited, folder, folder / "output")
        with contextlib.suppress(OSError):
            Client(self._address).close()  # whoever waits for the script learns that it has ended

    def _meet(self) -> dict[str, Any]:
        """Wait for a rank of the script to come to its loader."""
        rank = self._listener.accept()
        self._ranks.append(rank)
        return self._receive(rank, START_S)

    def ask(self, setting: Mapping[str, Any], batches: int) -> dict[str, Any]:
        """Let all ranks take a turn with a setting; returns what the first one has measured.

        :raises ScriptEnded: instead
        """
        with contextlib.suppress(OSError):  # it has ended; then nothing can be received either
            for rank in self._ranks:
                rank.send((setting, batches))
        return next(iter([self._receive(rank, 10 * self._limit_s) for rank in self._ranks]))

    def epoch(self) -> dict[str, Any]:
        """The next epoch of a check, of the first rank.

        :raises ScriptEnded: if there is no further
        """
        return self._receive(self._ranks[0], self._limit_s + GRACE_S)

    def _receive(self, rank: Connection, seconds: float) -> dict[str, Any]:
        if not rank.poll(seconds):
            raise ScriptEnded(f"the script said nothing for {seconds:.0f} s")
        try:
            received: dict[str, Any] = rank.recv()
            return received
        except (EOFError, ConnectionResetError):
            self._thread.join(GRACE_S)
            fine = self._outcome is None or self._outcome.status == 0
            raise ScriptEnded("the script ended" if fine else why_failed(self._outcome)) from None

    def __exit__(self, *_: object) -> None:
        end_all_but(self._before, patiently=False)
        for rank in self._ranks:
            rank.close()
        self._thread.join()
        self._listener.close()
        self._folder.cleanup()
