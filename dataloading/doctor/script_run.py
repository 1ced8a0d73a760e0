"""A run of somebody's script, whose loader takes turns that this process asks for; see dataloading/doctor/watch/rehearsal.py."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from common.foreign_script.failure import why_failed
from common.foreign_script.run import Outcome, injected, run
from dataloading.doctor.examine import LONGEST_S, WATCH
from dataloading.doctor.watch.turn import ScriptEnded

START_S = 300.0  # for a script to come to its loader
PATIENCE_S = 30.0  # for a batch
GRACE_S = 30.0


@dataclass(frozen=True)
class Script:
    """A script and its loader.

    :param command: as for ``common.foreign_script.run.run``
    :param environment: of its processes
    :param place: ``file:line`` that makes the loader, as the watch names it
    :param watches: other packages to load in each process, as for ``injected``
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    place: str
    watches: tuple[Path, ...] = ()


class ScriptRun:
    """A run of a script, from entering a block to leaving it.

    :ivar facts: of its loader
    """

    facts: dict[str, Any]

    def __init__(self, script: Script) -> None:
        self._script = script
        self._outcome: Outcome | None = None
        self._latest = time.monotonic() + START_S

    def __enter__(self) -> ScriptRun:
        self._folder = tempfile.TemporaryDirectory()
        self._address = os.path.join(self._folder.name, "address")
        self._listener = Listener(self._address, "AF_UNIX")
        self._thread = threading.Thread(target=self._run, args=(Path(self._folder.name),))
        self._thread.start()
        try:
            self._script_end = self._listener.accept()
            self._latest = math.inf
            self.facts = self._receive(START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _run(self, folder: Path) -> None:
        environment = {
            **self._script.environment,
            **injected(*self._script.watches, WATCH),
            "LOADER_DOCTOR_ADDRESS": self._address,
            "LOADER_DOCTOR_PLACE": self._script.place,
            "LOADER_DOCTOR_PATIENCE_S": str(PATIENCE_S),
        }
        self._outcome = run(self._script.command, environment, LONGEST_S, folder, folder / "output", self._is_over)
        with contextlib.suppress(OSError):
            Client(self._address).close()  # whoever waits for the script learns that it has ended

    def _is_over(self) -> bool:
        """Whether the script has had its time to come to its loader, or is needed no longer."""
        return time.monotonic() > self._latest

    def ask(self, setting: Mapping[str, Any], batches: int) -> dict[str, Any]:
        """Let the loader take a turn with a setting.

        :raises ScriptEnded: instead
        """
        with contextlib.suppress(OSError):  # it has ended; then nothing can be received either
            self._script_end.send((setting, batches))
        return self._receive(10 * PATIENCE_S)

    def _receive(self, seconds: float) -> dict[str, Any]:
        if not self._script_end.poll(seconds):
            raise ScriptEnded(f"the script said nothing for {seconds:.0f} s")
        try:
            received: dict[str, Any] = self._script_end.recv()
            return received
        except (EOFError, ConnectionResetError):
            self._thread.join(GRACE_S)
            outcome = self._outcome
            failed = why_failed(outcome) if outcome and outcome.status else ""
            raise ScriptEnded(failed or "the script did not use the loader, or no longer") from None

    def __exit__(self, *_: object) -> None:
        self._latest = -math.inf
        self._thread.join()
        self._listener.close()
        self._folder.cleanup()
