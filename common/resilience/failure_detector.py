"""The failure detector: what the ranks report to each other through the job's store, and the decision that all accept.

A failure spreads. In a ring, rank 1 sees rank 0's connection close, gives up and leaves; then rank 2 sees rank 1's connection
close. So no rank decides alone which rank failed first. Each reports what it sees. A rank that has to know reads all reports
and proposes a decision, and the first proposal that reaches the store is the decision of all ranks.

There are two kinds of reports, for two kinds of failures:

- *heartbeats*: where a rank's main thread is, once a second, or that it has failed; for ranks that wait without end. They go on in
  a thread; :mod:`common.resilience.watchdog` reads them when it has waited for too long.
- *suspicions*: which rank should have answered; from ranks whose send or receive failed. A process that ended on this host is named at
  once. Otherwise the suspicions lead to the lost rank: rank 3 suspects rank 2, which suspects rank 1, which suspects no rank, because
  it is the one that was lost.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from common.distributed import STORE_POLL_S
from common.distributed.dist_env import DistEnv

if TYPE_CHECKING:
    import psutil

BEAT_S = 1.0  # between two beats
STORE_S = 3.0  # time for the store to answer; its process may be the one that was stopped or lost
GRACE_S = 2.0  # time for a killed process to end (its connections close first), and for other ranks to report


class FailureDetector:
    """The reports and the decision of the ranks of one group. Every method waits for the store, which may not answer.

    :param key: prefix of its keys in the store; used once, since torchrun's store outlives a job
    :param rank: this rank in the group
    :param world_size: ranks in the group
    """

    def __init__(self, key: str, rank: int, world_size: int) -> None:
        self._report_keys = [f"{key}/report/{rank}" for rank in range(world_size)]
        self._own_key, self._decision_key, self._count_key = self._report_keys[rank], f"{key}/decision", f"{key}/count"
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

    def count(self) -> int:
        """How often the ranks have called this, all together."""
        return int(self._store.add(self._count_key, 1))

    def delete(self) -> None:
        """Delete all keys from the store."""
        for key in (*self._report_keys, self._decision_key, self._count_key):
            self._store.delete_key(key)


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

    To make one is no collective, but all ranks must have made theirs before one starts. The last rank that leaves deletes
    all keys.

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
            if state == "left" and self._detector.count() == self._world_size:
                self._detector.delete()
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


class RankLost(RuntimeError):
    """A rank ended, or did not answer in time, while others depended on it. The cause is what this rank saw of that.

    :param message: names the rank, its process and its host
    :param rank: its rank in the group; None if it is not known
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class Suspicion(NamedTuple):
    """A rank's report."""

    order: int  #: counts the reports in the order in which they were made
    suspect: int | None  #: the rank that should have answered; None if it might be any
    observation: str  #: how the suspect failed


class LostRank(NamedTuple):
    """The decision of all ranks."""

    rank: int | None
    observation: str


class Suspicions:
    """Reports this rank's suspicion, and finds out which rank was lost. To be made when all ranks live.

    :param key: see :class:`FailureDetector`
    :param rank: this rank in the group
    :param processes: host name and process id of each rank
    :param timeout_s: how long the group waits for a rank
    """

    def __init__(self, key: str, rank: int, processes: list[tuple[str, int]], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._names = [f"pid {pid} on {host}" for host, pid in processes]
        # Looked up now: after the end of a process, its id may be given to another one.
        self._processes = [_process(pid) if host == socket.gethostname() else None for host, pid in processes]
        self._detector = FailureDetector(key, rank, len(processes))
        self._lost: tuple[str, int | None] | None = None  # the arguments of RankLost

    def raise_if_lost(self) -> None:
        """:raises RankLost: if :meth:`report` has named a lost rank before"""
        if self._lost is not None:
            raise RankLost(*self._lost)

    def report(self, suspect: int | None, cause: Exception) -> RankLost:
        """Report a suspicion, wait for those of the other ranks, and agree with them on the rank that was lost first.

        That takes up to ``GRACE_S``, or no time if a process on this host has ended. The lost rank is, in this order: the
        one on which another rank has decided; one on this host whose process has ended; the only one that reports nothing;
        the one to which the first report leads. If the store is gone too, it is one that has ended, or ``suspect``.

        :param suspect: the rank that should have answered; None if it might be any
        :param cause: what this rank saw: a ``TimeoutError``, or an error of gloo's
        :returns: the error to raise, with the same message on every rank
        """
        if self._lost is None:
            text = str(cause).strip() or repr(cause)
            late = isinstance(cause, TimeoutError) or "timed out" in text.lower() or "timeout" in text.lower()
            observation = f"did not answer within {self._timeout_s:g} s" if late else "closed its connection"
            answers: list[LostRank] = []

            def agree() -> None:
                with contextlib.suppress(RuntimeError):  # the connection to the store is broken
                    answers.append(self._agree(suspect, observation))

            agreeing = threading.Thread(target=agree, daemon=True)  # a stopped store would never answer
            agreeing.start()
            agreeing.join(GRACE_S + 2 * STORE_S)
            rank, observation = answers[0] if answers else self._ended() or LostRank(suspect, observation)
            if rank is None:
                message = f"an all-reduce failed, and no rank is known to have caused it: {text.splitlines()[0]}"
            else:
                message = f"rank {rank} ({self._names[rank]}) {observation} during an all-reduce"
            self._lost = message, rank
        return RankLost(*self._lost)

    def _agree(self, suspect: int | None, observation: str) -> LostRank:
        detector = self._detector
        detector.connect()  # made only now, since it takes up to a second and is rarely needed
        detector.report(Suspicion(detector.count(), suspect, observation))
        deadline = time.monotonic() + GRACE_S
        while (decision := detector.decision()) is None:
            suspicions = {rank: Suspicion(*report) for rank, report in detector.reports().items()}
            ended = self._ended(suspicions)  # a rank that reports has survived the failure, and so did not cause it
            if ended or time.monotonic() >= deadline:
                decision = detector.propose(ended or lost_rank(suspicions, len(self._names)))
                break
            time.sleep(STORE_POLL_S)
        return LostRank(*decision)

    def _ended(self, reported: Collection[int] = ()) -> LostRank | None:
        """The first rank whose process on this host has ended, of those that have not reported."""
        ranks = (rank for rank, process in enumerate(self._processes) if rank not in reported and _has_ended(process))
        rank = next(ranks, None)
        return None if rank is None else LostRank(rank, "ended")


def lost_rank(suspicions: Mapping[int, Suspicion], world_size: int) -> LostRank:
    """The rank that was lost first.

    :param suspicions: by the rank that reports
    :returns: the only one that reports nothing; or else the one to which the first suspicion leads, from suspect to suspect, until
        one suspects no other rank
    """
    ordered = sorted(suspicions.values(), key=lambda suspicion: suspicion.order)
    silent = [rank for rank in range(world_size) if rank not in suspicions]
    lost = next((suspicion.suspect for suspicion in ordered if suspicion.suspect is not None), None)
    followed: set[int] = set()
    while lost is not None and lost in suspicions and lost not in followed:
        followed.add(lost)
        lost = suspicions[lost].suspect
    lost = silent[0] if len(silent) == 1 else lost
    # If no report names this rank, the first one saw the cause; later ones may have seen a survivor that gave up.
    return LostRank(lost, next((one for one in ordered if one.suspect == lost), ordered[0]).observation)


def _has_ended(process: psutil.Process | None) -> bool:
    if process is None:  # on another host
        return False
    import psutil

    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _process(pid: int) -> psutil.Process | None:
    import psutil  # not at the top: a job without hand-written all-reduces does not need it

    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:  # a container with processes of its own, but this host's name
        return None
