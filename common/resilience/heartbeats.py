"""Heartbeats: every rank reports once a second that its process runs, and where its main thread is.

Reports go to :mod:`common.resilience.failure_detector`; :mod:`common.resilience.watchdog` reads them when it has waited for
too long. With its last heartbeat, a rank that fails publishes that.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from common.distributed.dist_env import DistEnv
from common.resilience.failure_detector import FailureDetector

BEAT_S = 1.0  # between two beats
STORE_S = 3.0  # time for the store to answer; its process may be the one that was stopped


class Position(NamedTuple):
    """Where a rank's main thread is. All ranks pass the same positions in the same order."""

    step: int
    move: int  #: counts the phases within the step: micro-steps come to the same phase several times
    phase: str

    def __str__(self) -> str:
        return f"{self.phase} of step {self.step}"


class Beat(NamedTuple):
    """A rank's report."""

    number: int  #: counts the rank's beats
    position: Position
    idle_s: float = 0.0  #: how long its main thread has been there
    clock: float = 0.0  #: when it was sent, in seconds since 1970
    state: str = "here"  #: "left" or, after an exception, "failed" in the last beat

    @classmethod
    def parse(cls, text: str) -> Beat:
        """A beat from the JSON that was sent."""
        number, position, *rest = json.loads(text)
        return cls(number, Position(*position), *rest)

    @property
    def reached(self) -> tuple[bool, int, int]:
        """How far the rank is, to be compared; a rank that has left is ahead of all others."""
        return self.state == "left", self.position.step, self.position.move


class MissingRanks(NamedTuple):
    """The decision: the ranks for which the others wait."""

    where: str  #: the position of the rank that is furthest ahead; of a rank that failed, its own
    findings: dict[int, str]  #: what is known of each missing rank; of one that failed, its error
    waited_s: float = 0.0  #: how long the rank that decided had waited
    failed: bool = False  #: whether it is a rank that failed, and says so itself

    @classmethod
    def parse(cls, text: str) -> MissingRanks:
        """A decision from the JSON that was proposed."""
        where, findings, *rest = json.loads(text)
        return cls(where, {int(rank): finding for rank, finding in findings.items()}, *rest)


def silent_ranks(before: Sequence[Beat], now: Sequence[Beat]) -> list[int]:
    """The ranks that have sent no other beat, although they have not left.

    :param before: a beat of each rank
    :param now: a beat of each rank, so much later that each rank that lives has sent another one
    """
    return [rank for rank, beat in enumerate(now) if beat.number == before[rank].number and beat.state != "left"]


def missing_ranks(before: Sequence[Beat], now: Sequence[Beat]) -> list[int]:
    """The ranks for which the others wait.

    :param before, now: as of :func:`silent_ranks`
    :returns: the silent ranks; if there are none, those furthest behind; none if all are at the same position
    """
    if silent := silent_ranks(before, now):
        return silent
    reached = [beat.reached for beat in now]
    return [rank for rank, position in enumerate(reached) if position == min(reached) != max(reached)]


class Heartbeats:
    """Sends this rank's beats and reads those of all ranks, in a thread of its own, since the store may never answer.

    To make one is no collective, but all ranks must have made theirs before one starts. The last rank that leaves deletes
    all keys.

    :param key: see :class:`common.resilience.failure_detector.FailureDetector`
    :param env: this rank
    :param beat: makes a beat of what this rank does; its number and state are set here
    """

    decision: MissingRanks | None = None
    latest: list[Beat] | None = None  #: a beat of each rank, in a new list after each reading

    def __init__(self, key: str, env: DistEnv, beat: Callable[[], Beat]) -> None:
        self._beat = beat
        self._number = 0
        self._state = "here"
        self._proposal: str | None = None
        self._reading = False
        self._rank, self._world_size = env.rank, env.world_size
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._exchange, name="heartbeats", daemon=True)
        self._detector = FailureDetector(key, env.rank, env.world_size)
        self._send()

    def start(self) -> None:
        """Send a beat every ``BEAT_S`` from now on, and look for a decision."""
        self._thread.start()

    def set_reading(self, reading: bool) -> None:
        """Read the beats of all ranks from now on, or stop doing so."""
        self._reading = reading
        self._wake.set()

    def propose(self, missing: MissingRanks) -> None:
        """Propose a decision; it counts unless another rank's came first."""
        self._proposal = json.dumps(missing)
        self._wake.set()

    def close(self, failure: str | None = None) -> MissingRanks | None:
        """Send the last beat; returns the decision, if there is one by then.

        :param failure: with which error this rank leaves alone. That it has failed becomes the decision, if there is none
            before: the others, which may wait for it in a place that no error reaches, read decisions with every beat.
        """
        if failure is not None:
            self.propose(MissingRanks(str(self._beat().position), {self._rank: failure}, failed=True))
        self._state = "left" if failure is None else "failed"
        self._wake.set()
        self._thread.join(STORE_S)
        return self.decision

    def _exchange(self) -> None:
        with contextlib.suppress(RuntimeError):  # the process that serves the store has ended
            self._detector.connect()
            while True:
                state = self._send()
                self._receive()
                if state != "here":
                    break
                self._wake.wait(BEAT_S / 2 if self._reading else BEAT_S)
                self._wake.clear()
            if state == "left" and self._detector.count() == self._world_size:
                self._detector.delete()
        self._detector.disconnect()

    def _send(self) -> str:
        self._number += 1
        beat = self._beat()._replace(number=self._number, state=self._state)
        self._detector.report(json.dumps(beat))
        return beat.state

    def _receive(self) -> None:
        decision = self._detector.propose(self._proposal) if self._proposal else self._detector.decision()
        if self._reading:
            self.latest = [Beat.parse(text) for _, text in sorted(self._detector.reports().items())]
        if decision:
            self.decision = MissingRanks.parse(decision)
