"""A rank that hangs is named by all others, and what every rank was doing then is written down.

A rank that stops (SIGSTOP, an endless loop, a loader that waits for a disk) leaves the others in a collective. Their main
threads wait inside C++, where neither a signal handler nor an exception of Python reaches them, and gloo's own timeout names
nobody. So each rank has a monitor, in a thread of its own, and the monitors talk through the job's store:

1. *publish*: about once a second each sends a beat: a number that grows, and where its main thread is.
2. *suspect*: a monitor whose main thread has stayed in one place for too long reads the beats of all ranks for a while.
3. *decide*: the ranks whose beats have stopped are missing, or else those that are furthest behind. The first verdict that
   is written to the store counts for all.
4. *end*: every monitor logs it and its process's Python stacks, and ends the process, since nothing else frees its main
   thread. torchrun may then start the job again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from common.distributed.process_group import DistEnv
from common.resilience.heartbeats import STORE_S, Beat, Heartbeats, Position, Verdict

logger = logging.getLogger(__name__)

T = TypeVar("T")

TICK_S = 0.25  # between two looks of a monitor at its own main thread
LATE_S = 3.0  # a monitor that comes so late was itself stopped, perhaps with the whole job: that time counts for nobody
LISTEN_S = 2.5  # a rank that lives sends two beats meanwhile
FAREWELL_S = 1.5  # for all ranks to read the verdict, which they do with every beat
LAST_WORDS_S = 10.0  # for the report, which a full disk or pipe may block
MOST_NAMED = 3


class Watchdog:
    """Watch over the ranks' main threads for the length of a ``with`` block, which all ranks enter together, once.

    Whoever is missing is named in one logged error, on every rank, and in torchrun's report; the Python stacks of all threads
    go to the log file (stderr if there is none). Then the process ends with exit status 1, and its loader workers with it.
    A rank that is only slow is named too, when the others have waited for so long.

    :param env: from :func:`common.distributed.process_group.process_group`; a rank without others watches itself
    :param timeout_s: how long a rank's main thread may stay in one place before its monitor asks who is missing. It takes
        up to 5 s more to find out. The process group's timeout has to be longer than both, or gloo speaks first.
    """

    def __init__(self, env: DistEnv, timeout_s: float) -> None:
        self._place, self._timeout_s = env, timeout_s
        self._at = Position(0, 0, "start")  # set by the main thread; that it is another object is the sign of life
        self._pauses = 0
        self._idle_s = 0.0  # that the monitor has seen the main thread in the same place
        self._names: list[str] = [""] * env.world_size
        self._beats: Heartbeats | None = None  # alone, there is nobody to send them to
        self._suspecting = False
        self._over = threading.Event()
        self._monitor = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def at(self, step: int, phase: str) -> None:
        """The main thread comes to this phase of this step. Every rank says so at the same places of the program."""
        self._at = Position(step, self._at.move + 1 if step == self._at.step else 0, phase)

    def each(self, batches: Iterable[T], phase: str) -> Iterator[T]:
        """The same batches, each of which is a sign of life; the ranks may have different numbers of them. Who has had all
        of its own is ahead of those who have not."""
        self.at(self._at.step, phase)
        for batch in batches:
            self._move()
            yield batch
            self._move()
        self.at(self._at.step, f"the end of {phase}")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A block that may take any time on this rank. Ranks that wait for its end have to be in such a block too."""
        self._pauses += 1
        try:
            yield
        finally:
            self._move()
            self._pauses -= 1

    def _move(self) -> None:
        self._at = Position(*self._at)

    def __enter__(self) -> Watchdog:
        if self._place.world_size > 1:
            key = [f"watchdog/{secrets.token_hex(8)}"]
            dist.broadcast_object_list(key)
            self._beats = Heartbeats(key[0], self._place, self._beat)
            name = f"rank {self._place.rank} (host {self._place.host}, pid {os.getpid()})"
            dist.all_gather_object(self._names, name)  # and so all ranks have made their Heartbeats
            self._beats.start()
        self._monitor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._suspecting and isinstance(
            error, Exception
        ):  # a peer that waited for the same rank may have left first
            logger.error("while a missing rank is looked for: %s: %s", type(error).__name__, error, exc_info=error)
            self._monitor.join(LISTEN_S + 2 * STORE_S)  # it ends the process, if it finds out
        self._move()
        verdict = self._beats.close("left" if error is None else "failed") if self._beats else None
        if verdict is None:
            self._over.set()
        self._monitor.join()

    # The rest runs in the monitor's thread.

    def _watch(self) -> None:
        ticks = self._ticks()
        for _ in ticks:
            if self._beats is not None and self._beats.verdict is not None:
                self._end(self._report(self._beats.verdict))
            if self._is_stuck():
                self._suspecting = True
                if self._beats is None:
                    self._end(f"this rank {_whereabouts(self._beat())}")
                self._suspect(self._beats, ticks)
                self._suspecting = False

    def _ticks(self) -> Iterator[float]:
        """Look at the main thread, and tell the seconds since the last look, until the block is over."""
        seen, last = self._at, time.monotonic()
        while not self._over.wait(TICK_S):
            now = time.monotonic()
            passed = now - last if now - last < LATE_S else 0.0
            self._idle_s = self._idle_s + passed if self._at is seen else 0.0
            seen, last = self._at, now
            yield passed

    def _is_stuck(self) -> bool:
        return self._idle_s >= self._timeout_s and not self._pauses

    def _beat(self) -> Beat:
        return Beat(0, self._at, self._idle_s, time.time())

    def _suspect(self, beats: Heartbeats, ticks: Iterator[float]) -> None:
        """Read the beats of all ranks, and propose a verdict; until there is one, or the main thread goes on."""
        before: list[Beat] | None = None
        last = beats.reading  # of an earlier suspicion
        listened = unanswered = 0.0
        beats.listen(True)
        for passed in ticks:
            if beats.verdict is not None or not self._is_stuck():
                break
            listened += passed
            unanswered += passed
            now = beats.reading
            if now is None or now is last:
                if unanswered >= STORE_S:
                    self._end(self._without_store())
                continue
            last, unanswered = now, 0.0
            if before is None:
                before, listened = now, 0.0
            if listened >= LISTEN_S:
                beats.propose(_decide(before, now))
        beats.listen(False)

    def _report(self, verdict: Verdict) -> str:
        """The verdict as this rank says it."""
        if not verdict.late:
            return (
                f"all {self._place.world_size} ranks have been at {verdict.where} for {self._timeout_s:g} s: no rank is "
                "behind, so what they do there together does not end"
            )
        words = []
        for rank, finding in list(verdict.late.items())[:MOST_NAMED]:
            if rank == self._place.rank:
                words.append(f"this rank {finding}, and was waited for in {verdict.where}")
            else:
                absence = f"did not arrive in {verdict.where} within {self._timeout_s:g} s"
                words.append(f"{self._names[rank]} {absence}: it {finding}")
        more = len(verdict.late) - MOST_NAMED
        return "; ".join(words) + (f"; and {more} more" if more > 0 else "")

    def _without_store(self) -> str:
        of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        holder = "torchrun's process there" if of_torchrun else self._names[0]
        return (
            f"the job's store at MASTER_ADDR {os.environ['MASTER_ADDR']} does not answer: this host is cut off from it, or "
            f"{holder}, which holds it, has stopped (this rank {_whereabouts(self._beat())})"
        )

    def _end(self, report: str) -> NoReturn:
        """Say it, write the stacks, and end the process."""
        log = _log_descriptor()
        # Its own thread, in C, ends the process if the main thread holds the lock of a log that it cannot write to.
        faulthandler.dump_traceback_later(LAST_WORDS_S, exit=True, file=log)
        try:
            raise TimeoutError(report)  # raised, since torchrun's report shows the traceback
        except TimeoutError as error:
            get_error_handler().record_exception(error)
        logger.error(report)
        heading = f"The Python stacks of rank {self._place.rank} (pid {os.getpid()}), the latest call first:\n"
        os.write(log, heading.encode())
        faulthandler.dump_traceback(log)
        sys.stdout.flush()
        if self._beats is not None:
            time.sleep(FAREWELL_S)
        for child in multiprocessing.active_children():  # loader workers
            child.kill()
        os._exit(1)


def missing_ranks(before: Sequence[Beat], now: Sequence[Beat]) -> list[int]:
    """The ranks for which the others wait.

    :param before: a beat of each rank; :param now: the same when each rank that lives has sent another
    :returns: those that have sent none although they have not left; if there are none, those furthest behind; none if all
        are at the same position
    """
    silent = [rank for rank, beat in enumerate(now) if beat.number == before[rank].number and beat.state != "left"]
    if silent:
        return silent
    reached = [beat.reached for beat in now]
    return [rank for rank, position in enumerate(reached) if position == min(reached) != max(reached)]


def _decide(before: Sequence[Beat], now: Sequence[Beat]) -> Verdict:
    late = {}
    for rank in missing_ranks(before, now):
        beat = now[rank]
        if beat.state == "failed":
            late[rank] = "has failed (see its own log)"
        elif beat.number == before[rank].number:
            silence_s = max(LISTEN_S, time.time() - beat.clock)  # its host's clock may be ahead
            late[rank] = f"has given no sign of life for {silence_s:.0f} s (stopped, or cut off)"
        else:
            late[rank] = f"{_whereabouts(beat)} (its Python stacks are in its own log)"
    furthest = max(now, key=lambda beat: beat.reached)
    return Verdict("the end" if furthest.state == "left" else str(furthest.position), late)


def _whereabouts(beat: Beat) -> str:
    return f"has been at {beat.position} for {beat.idle_s:.0f} s"


def _log_descriptor() -> int:
    """The file of this rank's log, or else stderr."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler) and handler.stream is not None:
            return handler.stream.fileno()
    return 2
