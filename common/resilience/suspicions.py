"""Suspicions: ranks whose send or receive failed find out together which rank was lost first.

Each reports which rank should have answered (:mod:`common.resilience.failure_detector`). A process that ended on this host is named
at once. Otherwise the suspicions lead to the lost rank: rank 3 suspects rank 2, which suspects rank 1, which suspects no rank,
because it is the one that was lost.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

from common.distributed import STORE_POLL_S
from common.resilience.failure_detector import STORE_S, FailureDetector

GRACE_S = 2.0  # time for a killed process to end (its connections close first), and for other ranks to report


class RankLost(RuntimeError):
    """A rank ended, or did not answer in time, while others depended on it. The message names it, its process and its host.

    The cause is what this rank saw of that.
    """


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

    :param key: see :class:`~common.resilience.failure_detector.FailureDetector`
    :param rank: this rank in the group
    :param processes: host name and process id of each rank
    :param timeout_s: how long the group waits for a rank
    """

    def __init__(self, key: str, rank: int, processes: list[tuple[str, int]], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._names = [f"pid {pid} on {host}" for host, pid in processes]
        # Only those that live here now: a container with processes of its own may have this host's name.
        here = socket.gethostname()
        self._pids = {r: pid for r, (host, pid) in enumerate(processes) if host == here and not _has_ended(pid)}
        self._detector = FailureDetector(key, rank, len(processes))
        self._lost: str | None = None  # the message of RankLost

    def raise_if_lost(self) -> None:
        """:raises RankLost: if :meth:`report` has named a lost rank before"""
        if self._lost is not None:
            raise RankLost(self._lost)

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
                self._lost = f"an all-reduce failed, and no rank is known to have caused it: {text.splitlines()[0]}"
            else:
                self._lost = f"rank {rank} ({self._names[rank]}) {observation} during an all-reduce"
        return RankLost(self._lost)

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
        ended = (rank for rank, pid in self._pids.items() if rank not in reported and _has_ended(pid))
        return next((LostRank(rank, "ended") for rank in ended), None)


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


def _has_ended(pid: int) -> bool:
    import psutil  # not at the top: a job without hand-written all-reduces does not need it

    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
