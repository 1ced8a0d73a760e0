"""The failure detector: the ranks report to each other through the job's store, and all accept one decision.

A failure spreads. In a ring, rank 1 sees rank 0's connection close, gives up and leaves; then rank 2 sees rank 1's connection
close. So no rank decides alone which rank failed first. Each reports what it sees. A rank that has to know reads all reports
and proposes a decision, and the first proposal that reaches the store is the decision of all ranks.

The reports are *heartbeats*: where a rank's main thread is, once a second, or that it has failed. They go on in a thread, while the
main thread may wait without end; :mod:`ddp.watchdog.watchdog` reads them when it has waited for too long.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from common.distributed.dist_env import DistEnv

BEAT_S = 1.0  # between two beats
STORE_S = 3.0  # time for the store to answer; its process may be the one that was stopped or lost


class FailureDetector:
    """The reports and the decision of the ranks of one group. Every method waits for the store, which may not answer.

    :param key: prefix of its keys in the store; used once, since torchrun's store outlives a job, and nothing deletes them
    :param rank: this rank in the group
    :param world_size: ranks in the group
    """

    def __init__(self, key: str, rank: int, world_size: int) -> None:
        self._report_keys = [f"{key}/report/{rank}" for rank in range(world_size)]
        self._own_key, self._decision_key = self._report_keys[rank], f"{key}/decision"
        self._job_store: Any = dist.distributed_c10d._get_default_store()
        self._store = self._job_store

    def connect(self) -> None:
        """Use a connection of its own from now on: on the job's, the main thread may wait for something else."""
        self._store = self._job_store.clone()

    def disconnect(self) -> None:
        """Close that connection."""
        self._store = self._job_store

    def report(self, content: object) -> None:
        """Replace this rank's report, in JSON's types (a tuple arrives as a list)."""
        self._store.set(self._own_key, json.dumps(content))

    def reports(self) -> dict[int, Any]:
        """The latest report of each rank that has made one."""
        ranks = list(range(len(self._report_keys)))
        if not self._store.check(self._report_keys):  # a get would wait for a report that was never made
            ranks = [rank for rank in ranks if self._store.check([self._report_keys[rank]])]
        texts = self._store.multi_get([self._report_keys[rank] for rank in ranks])
        return {rank: json.loads(text) for rank, text in zip(ranks, texts, strict=True)}

    def propose(self, decision: object) -> Any:
        """Propose a decision; returns the one that counts: this one, unless another rank's came first."""
        return json.loads(self._store.compare_set(self._decision_key, "", json.dumps(decision)))

    def decision(self) -> Any:
        """The decision; None if no rank has proposed one."""
        return json.loads(self._store.get(self._decision_key)) if self._store.check([self._decision_key]) else None


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
    def parse(cls, number: int, position: list[Any], *rest: Any) -> Beat:
        """A beat from what was reported."""
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
    def parse(cls, where: str, findings: dict[str, str], *rest: Any) -> MissingRanks:
        """A decision from what was proposed."""
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

    To make one is no collective, but all ranks must have made theirs before one starts.

    :param key: see :class:`FailureDetector`
    :param env: this rank
    :param beat: makes a beat of what this rank does; its number and state are set here
    """

    decision: MissingRanks | None = None
    latest: list[Beat] | None = None  #: a beat of each rank, in a new list after each reading

    def __init__(self, key: str, env: DistEnv, beat: Callable[[], Beat]) -> None:
        self._beat = beat
        self._number = 0
        self._state = "here"
        self._proposal: MissingRanks | None = None
        self._reading = False
        self._rank = env.rank
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
        self._proposal = missing
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
        self._detector.disconnect()

    def _send(self) -> str:
        self._number += 1
        beat = self._beat()._replace(number=self._number, state=self._state)
        self._detector.report(beat)
        return beat.state

    def _receive(self) -> None:
        decision = self._detector.propose(self._proposal) if self._proposal else self._detector.decision()
        if self._reading:
            self.latest = [Beat.parse(*beat) for _, beat in sorted(self._detector.reports().items())]
        if decision is not None:
            self.decision = MissingRanks.parse(*decision)
