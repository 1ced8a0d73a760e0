"""The ranks of a group as each sees the others: how to send to one, and which one it was when an answer does not come.

A failure spreads. In a ring, rank 1 sees rank 0's connection close, gives up and leaves; rank 2 sees rank 1's connection
close. Whoever wants to know why the job stopped wants to read "rank 0", on every rank. So ranks that fail tell each other
what they saw, through the job's store, and agree on the one that was lost first.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist
from torch import Tensor

GRACE_S = 2.0  # for a killed process to end after its connections did, and for other ranks to tell what they saw
POLL_S = 0.02
STORE_S = 5.0  # for an answer of the store, which may have lived in the rank that was lost


class RankLost(RuntimeError):
    """A rank ended, or did not answer in time, while others counted on it; the cause is what this rank saw of that.

    :param rank: its rank in the group; None if it could not be told which
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class P2P:
    """The ranks of a group, and a line to each for CPU tensors; ranks are the group's own, counted from 0.

    To make one is a collective. Each has a tag of its own, so that its messages never meet those of another, nor the group's
    collectives in another thread; its own methods are for one thread at a time.

    :param group: the default group when None
    """

    rank: int
    size: int
    hosts: list[str]  #: host name of each rank
    group: dist.ProcessGroup  #: the whole one, also after :meth:`among`
    timeout_s: float  #: how long the group waits for a rank

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        group = group or dist.group.WORLD
        assert group is not None, "init_process_group comes first"
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout_s = group._get_backend(group._device_types[0]).options._timeout.total_seconds()
        self.group = group
        introductions: list[tuple[str, int, int]] = [("", 0, 0)] * self.size
        dist.all_gather_object(introductions, (socket.gethostname(), os.getpid(), secrets.randbits(31)), group)
        self.hosts = [host for host, _, _ in introductions]
        self._tag = introductions[0][2]
        self._members = list(range(self.size))  # in the group
        self._witness = _Witness([(host, pid) for host, pid, _ in introductions], self._tag, self.timeout_s)

    def among(self, ranks: Sequence[int]) -> P2P:
        """The same lines, with only ``ranks``, this one among them, renumbered in their order; no communication.

        :class:`RankLost` keeps naming ranks as the group counts them.
        """
        few = copy.copy(self)
        few.rank, few.size = list(ranks).index(self.rank), len(ranks)
        few.hosts = [self.hosts[rank] for rank in ranks]
        few._members = [self._members[rank] for rank in ranks]
        return few

    def send(self, tensor: Tensor, to: int) -> None:
        """Send ``tensor``, of any shape but contiguous; returns when it may be overwritten. :raises RankLost:"""
        self._wait(self._isend(tensor, to), to)

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill ``tensor`` with what ``source`` sends: as many elements, of the same dtype. :raises RankLost:"""
        self._wait(self._irecv(tensor, source), source)

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> None:
        """:meth:`send` and :meth:`receive` at once, as neighbours must who both wait for each other. :raises RankLost:"""
        receiving = self._irecv(incoming, source)
        sending = self._isend(outgoing, to)
        self._wait(receiving, source)
        self._wait(sending, to)

    def _isend(self, tensor: Tensor, to: int) -> dist.Work | None:
        if not tensor.numel():  # as both sides know
            return None
        with self.counting_on(to):
            return dist.isend(tensor, group=self.group, tag=self._tag, group_dst=self._members[to])

    def _irecv(self, tensor: Tensor, source: int) -> dist.Work | None:
        if not tensor.numel():
            return None
        with self.counting_on(source):
            return dist.irecv(tensor, group=self.group, tag=self._tag, group_src=self._members[source])

    def _wait(self, work: dist.Work | None, suspect: int) -> None:
        if work is not None:
            with self.counting_on(suspect):
                work.wait()

    @contextlib.contextmanager
    def counting_on(self, suspect: int | None) -> Iterator[None]:
        """A block that needs ``suspect``, or all ranks if None: its ``RuntimeError`` becomes the :class:`RankLost` that
        :meth:`lost` makes of it. After a loss no block is entered any more, and the same is raised again: ranks that gave up
        at different points would wait for each other.
        """
        self._witness.repeat()
        try:
            yield
        except RuntimeError as error:  # all that gloo raises
            raise self.lost(suspect, error) from error

    def lost(self, suspect: int | None, cause: Exception) -> RankLost:
        """Find out which rank was lost first, at once if its process on this host has ended, else in ``GRACE_S``.

        It is the one that another rank has named already; else one on this host whose process has ended; else the only
        one that does not report a failure too; else whom the first report leads to: rank 3 reports rank 2, which reports
        rank 1, which does not report. If the store is gone too, it is one that has ended, or ``suspect``.

        :param suspect: the one that should have answered; None if it might be any
        :param cause: what was seen of that: a ``TimeoutError``, or an error of gloo's
        :returns: the error to raise, the same on every rank; its rank is that in the group, also after :meth:`among`
        """
        return self._witness.testify(
            by=self._members[self.rank], against=None if suspect is None else self._members[suspect], cause=cause
        )


class _Report(NamedTuple):
    by: int
    against: int | None
    how: str
    final: bool = False  # not a suspicion but the verdict


class _Witness:
    """What the ranks of a group report to each other about the one that was lost, and the verdict that follows."""

    def __init__(self, processes: list[tuple[str, int]], token: int, timeout_s: float) -> None:
        self._names = [f"pid {pid} on {host}" for host, pid in processes]
        # Known from now on: their pids may be given to others after their end.
        self._processes = [_process(pid) if host == socket.gethostname() else None for host, pid in processes]
        self._timeout_s = timeout_s
        self._journal = _Journal(f"rank-lost/{token}")
        self._verdict: tuple[str, int | None] | None = None  # what RankLost is made of

    def repeat(self) -> None:
        """:raises RankLost: if there is a verdict already"""
        if self._verdict is not None:
            raise RankLost(*self._verdict)

    def testify(self, by: int, against: int | None, cause: Exception) -> RankLost:
        """Report, hear the others, and agree with them: see :meth:`P2P.lost`."""
        if self._verdict is None:
            words = str(cause).strip() or repr(cause)
            late = isinstance(cause, TimeoutError) or "timed out" in words.lower() or "timeout" in words.lower()
            how = f"did not answer within {self._timeout_s:g} s" if late else "closed its connection"
            own = _Report(by, against, how)
            self._journal.append(own)
            verdict = self._judge(own)
            self._journal.append(verdict)
            verdict = next((report for report in self._journal.read() if report.final), verdict)  # the first one counts
            rank = verdict.against
            if rank is None:
                message = f"an all-reduce failed, and no rank is known to have caused it: {words.splitlines()[0]}"
            else:
                message = f"rank {rank} ({self._names[rank]}) {verdict.how} during an all-reduce"
            self._verdict = message, rank
        return RankLost(*self._verdict)

    def _judge(self, own: _Report) -> _Report:
        deadline = time.monotonic() + GRACE_S
        while True:
            reports = self._journal.read() or [own]
            for report in reports:
                if report.final:
                    return report
            # A rank that reports has lived to see the failure, and so is not what caused it.
            accused = {report.by: report.against for report in reports}
            silent = [rank for rank in range(len(self._names)) if rank not in accused]
            for rank in silent:
                if self._has_ended(rank):
                    return _Report(own.by, rank, "ended", final=True)
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_S)

        if len(silent) == 1:
            lost: int | None = silent[0]
        else:
            lost = next((report.against for report in reports if report.against is not None), None)
            followed = set()
            while lost in accused and lost not in followed:
                followed.add(lost)
                lost = accused[lost]
        how = next((report.how for report in reports if report.against == lost), own.how)
        return _Report(own.by, lost, how, final=True)

    def _has_ended(self, rank: int) -> bool:
        process = self._processes[rank]
        if process is None:  # on another host
            return False
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


class _Journal:
    """Reports that any rank appends to and all read in the same order, in the job's store; empty if that is gone.

    :param key: of this group alone, in this job alone: a store outlives a job that torchrun restarts
    """

    def __init__(self, key: str) -> None:
        self._job = dist.distributed_c10d._get_default_store()
        self._store: Any = None
        self._key = key
        self._gone = False

    def append(self, report: _Report) -> None:
        line = json.dumps(report) + "\n"
        self._ask(lambda store: store.append(self._key, line))

    def read(self) -> list[_Report]:
        """To be called after an append: of a key that does not exist, a store waits to be told."""
        text: bytes = self._ask(lambda store: store.get(self._key)) or b""
        return [_Report(*json.loads(line)) for line in text.splitlines()]

    def _ask(self, question: Callable[[Any], bytes | None]) -> bytes | None:
        answers: list[bytes | None] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                # A connection of its own: the main thread may wait for something in the store on the other. It can take a
                # second to make, and is hardly ever needed.
                self._store = self._store or self._job.clone()
                answers.append(question(self._store))

        if not self._gone:
            asking = threading.Thread(target=ask, daemon=True)  # a stopped process would never answer
            asking.start()
            asking.join(STORE_S)
            self._gone = not answers
        return answers[0] if answers else None


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:  # a container with processes of its own, but its neighbour's host name
        return None
