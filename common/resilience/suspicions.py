"""Which rank was lost first, when sends and receives between ranks fail: each rank reports the rank that it suspects.

A process that ended on this host is found at once. Otherwise the ranks' suspicions lead to the lost one: rank 3 suspects
rank 2, which suspects rank 1, which suspects no rank, because it is the one that was lost.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from common.resilience.failure_detector import FailureDetector

if TYPE_CHECKING:
    import psutil

GRACE_S = 2.0  # time for a killed process to end (its connections close first), and for other ranks to report
POLL_S = 0.02
STORE_S = 5.0  # time for the store to answer; its process may be the one that was lost

T = TypeVar("T")


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

    :param key: see :class:`common.resilience.failure_detector.FailureDetector`
    :param rank: this rank in the group
    :param processes: host name and process id of each rank
    :param timeout_s: how long the group waits for a rank
    """

    def __init__(self, key: str, rank: int, processes: list[tuple[str, int]], timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._names = [f"pid {pid} on {host}" for host, pid in processes]
        # Looked up now: after the end of a process, its id may be given to another one.
        self._processes = [_process(pid) if host == socket.gethostname() else None for host, pid in processes]
        self._detector = FailureDetector(key, rank, len(processes))
        self._connected = self._store_is_gone = False
        self._lost: tuple[str, int | None] | None = None  # the arguments of RankLost

    def raise_if_lost(self) -> None:
        """:raises RankLost: if :meth:`report` has found a lost rank before"""
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
            own = Suspicion(self._ask(self._detector.count) or 0, suspect, observation)
            self._ask(lambda: self._detector.report(json.dumps(own)))
            proposal = self._decide(own)
            decision = self._ask(lambda: self._detector.propose(json.dumps(proposal)))
            lost = LostRank(*json.loads(decision)) if decision else proposal
            if lost.rank is None:
                message = f"an all-reduce failed, and no rank is known to have caused it: {text.splitlines()[0]}"
            else:
                message = f"rank {lost.rank} ({self._names[lost.rank]}) {lost.observation} during an all-reduce"
            self._lost = message, lost.rank
        return RankLost(*self._lost)

    def _decide(self, own: Suspicion) -> LostRank:
        deadline = time.monotonic() + GRACE_S
        while True:
            decision = self._ask(self._detector.decision)
            if decision:
                return LostRank(*json.loads(decision))
            reports = self._ask(self._detector.reports) or {}
            suspicions = {rank: Suspicion(*json.loads(text)) for rank, text in reports.items()} or {self._rank: own}
            # A rank that reports has survived the failure, and so did not cause it.
            silent = [rank for rank in range(len(self._names)) if rank not in suspicions]
            for rank in silent:
                if self._has_ended(rank):
                    return LostRank(rank, "ended")
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_S)

        lost = silent[0] if len(silent) == 1 else follow(suspicions)
        # If no report names this rank, the first one saw the cause; later ones may have seen a survivor that gave up.
        ordered = _in_order(suspicions)
        return LostRank(lost, next((one for one in ordered if one.suspect == lost), ordered[0]).observation)

    def _has_ended(self, rank: int) -> bool:
        process = self._processes[rank]
        if process is None:  # on another host
            return False
        import psutil

        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def _ask(self, question: Callable[[], T]) -> T | None:
        """The store's answer; None if it does not answer within ``STORE_S``, or did not answer before."""
        answers: list[T] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):  # the connection is broken
                if not self._connected:  # made only now, since it takes up to a second and is rarely needed
                    self._detector.connect()
                    self._connected = True
                answers.append(question())

        if not self._store_is_gone:
            asking = threading.Thread(target=ask, daemon=True)  # a stopped process would never answer
            asking.start()
            asking.join(STORE_S)
            self._store_is_gone = not answers
        return answers[0] if answers else None


def follow(suspicions: Mapping[int, Suspicion]) -> int | None:
    """The rank to which the first suspicion leads: from suspect to suspect, until one suspects no other rank.

    :param suspicions: by the rank that reports
    """
    lost = next((suspicion.suspect for suspicion in _in_order(suspicions) if suspicion.suspect is not None), None)
    followed: set[int] = set()
    while lost is not None and lost in suspicions and lost not in followed:
        followed.add(lost)
        lost = suspicions[lost].suspect
    return lost


def _in_order(suspicions: Mapping[int, Suspicion]) -> list[Suspicion]:
    return sorted(suspicions.values(), key=lambda suspicion: suspicion.order)


def _process(pid: int) -> psutil.Process | None:
    import psutil  # not at the top: a job without hand-written all-reduces does not need it

    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:  # a container with processes of its own, but this host's name
        return None
