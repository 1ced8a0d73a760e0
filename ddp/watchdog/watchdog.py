"""The watchdog: a rank that hangs is named by all others, and what every rank was doing then is written down.

A rank that stops (SIGSTOP, an endless loop, a loader that waits for a disk) leaves the others in a collective. Their main
threads wait inside C++, where neither a signal handler nor a Python exception reaches them, and gloo's own timeout names no
rank. So each rank has a monitor in a thread of its own, which takes part in failure detection:

1. *Report*: once a second, each rank sends a heartbeat: a number that grows, and where its main thread is.
2. *Suspect*: a monitor whose main thread has stayed in one place for too long reads the heartbeats of all ranks for a while.
3. *Decide*: the ranks without new heartbeats are missing, or else those that are furthest behind. The first decision in the
   job's store counts for all ranks.
4. *End*: every monitor logs the decision and its process's Python stacks, and ends the process, since nothing else frees its
   main thread. torchrun may then start the job again.

Two things shorten the wait:

- A rank that fails publishes that with its last heartbeat, as the decision. On NCCL the others wait for the device, where no
  error reaches them. A monitor whose main thread does not move for ``IDLE_S`` after that ends the process.
- A stop request is also what torchrun sends when a rank was killed, which could publish nothing. A main thread that does not
  move has not answered it. After ``IDLE_S`` its monitor looks for ranks without heartbeats. If all live, the step is slow.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from common.distributed.dist_env import DistEnv
from common.errors import leaves_together, one_line
from common.files.run_directory import FLIGHT_RECORDER_FOLDER
from common.signals.stop_request import end_at_once
from ddp.watchdog.failure_detector import (
    STORE_S,
    Beat,
    Heartbeats,
    MissingRanks,
    Position,
    missing_ranks,
    silent_ranks,
)
from ddp.watchdog.flight_recorder import write_collectives

logger = logging.getLogger(__name__)

T = TypeVar("T")

TICK_S = 0.25  # between two looks of a monitor at its own main thread
STOPPED_S = 3.0  # a monitor that looks so late was stopped itself, perhaps with the whole job: that time does not count
IDLE_S = 5.0  # that a main thread may stay in one place after another rank failed, or a stop was requested
LISTEN_S = 2.5  # time to listen to heartbeats: a rank that lives sends two
READ_DECISION_S = 1.5  # until all ranks have read the decision, as they do with every heartbeat
LAST_REPORT_S = 10.0  # until the last report is written, which a full disk or pipe may block
MOST_NAMED = 3
MOST_OF_AN_ERROR = 300  # characters of another rank's error


class Watchdog:
    """Watches the ranks' main threads during a ``with`` block, which all ranks enter together, once.

    Every rank logs one error that names the missing ranks, which is also in torchrun's report. The Python stacks of all
    threads go to the log file (stderr if there is none). Then the process ends with exit status 1, and its loader workers
    with it. A rank that is only slow is named too, when the others have waited for so long.

    :param env: this rank; a rank without others watches itself
    :param timeout_s: how long a rank's main thread may stay in one place before its monitor looks for missing ranks. That
        takes up to 5 s more. The process group's timeout must be longer than both together, or gloo reports an error first.

    ``position`` is where the main thread is. It may set it itself: a new object is a sign of life, even an equal one.
    ``stop_requested`` says whether this rank was asked to stop.
    """

    def __init__(self, env: DistEnv, timeout_s: float) -> None:
        self._env, self._timeout_s = env, timeout_s
        self.stop_requested: Callable[[], bool] = lambda: False
        self.position = Position(0, 0, "start")
        self._pauses = 0
        self._idle_s = 0.0  # how long the monitor has seen the main thread in the same place
        self._names: list[str] = [""] * env.world_size
        self._beats: Heartbeats | None = None  # None in a job of one rank
        self._suspecting = False
        self._over = threading.Event()
        self._monitor = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def at(self, step: int, phase: str) -> None:
        """The main thread enters this phase of this step. Every rank calls this at the same places of the program."""
        self.position = Position(step, self.position.move + 1 if step == self.position.step else 0, phase)

    def each(self, batches: Iterable[T], phase: str) -> Iterator[T]:
        """The same batches; each one is a sign of life. Ranks may have different numbers of batches: a rank that finished
        its batches counts as ahead of those that have not."""
        self.at(self.position.step, phase)
        for batch in batches:
            self._give_sign_of_life()
            yield batch
            self._give_sign_of_life()
        self.at(self.position.step, f"the end of {phase}")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A block that may take any time on this rank. Ranks that wait for its end have to be in such a block too."""
        self._pauses += 1
        try:
            yield
        finally:
            self._give_sign_of_life()
            self._pauses -= 1

    def _give_sign_of_life(self) -> None:
        self.position = Position(*self.position)

    def __enter__(self) -> Watchdog:
        if self._env.world_size > 1:
            start = [f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{secrets.token_hex(4)}"]
            dist.broadcast_object_list(start)
            self._start = start[0]
            self._beats = Heartbeats(f"watchdog/{self._start}", self._env, self._beat)
            name = f"rank {self._env.rank} (host {self._env.host}, pid {os.getpid()})"
            dist.all_gather_object(self._names, name)  # afterwards, all ranks have made their Heartbeats
            self._beats.start()
        self._monitor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Another rank that waited for the same missing rank may have left first, and this one's collective failed.
        if self._suspecting and isinstance(error, Exception):
            logger.error("while a missing rank is looked for: %s: %s", type(error).__name__, error, exc_info=error)
            self._monitor.join(LISTEN_S + 2 * STORE_S)  # the monitor ends the process if it finds the rank
        self._give_sign_of_life()
        decision = self._beats.close(_failure(error)) if self._beats else None
        if decision is None or decision.failed:  # otherwise the monitor ends the process
            self._over.set()
        self._monitor.join()

    # The rest runs in the monitor's thread.

    def _watch(self) -> None:
        ticks = self._ticks()
        idle_s = 0.0  # of _idle_s, what has passed since another rank's failure is known
        for passed in ticks:
            decision = self._beats.decision if self._beats is not None else None
            if decision is not None:
                idle_s = min(self._idle_s, idle_s + passed)
                if not decision.failed or (idle_s >= IDLE_S and not self._pauses):
                    self._end(self._describe(decision))
            elif self._is_stuck():
                self._suspecting = True
                if self._beats is None:
                    self._end(f"this rank {_whereabouts(self._beat())}")
                self._suspect(self._beats, ticks)
                self._suspecting = False

    def _ticks(self) -> Iterator[float]:
        """Look at the main thread every ``TICK_S``, and yield the seconds since the last look, until the block is over."""
        seen, last = self.position, time.monotonic()
        while not self._over.wait(TICK_S):
            now = time.monotonic()
            passed = now - last if now - last < STOPPED_S else 0.0
            self._idle_s = self._idle_s + passed if self.position is seen else 0.0
            seen, last = self.position, now
            yield passed

    def _is_stuck(self) -> bool:
        patience_s = self._timeout_s
        if self._beats is not None and self.stop_requested():
            patience_s = min(IDLE_S, patience_s)
        return self._idle_s >= patience_s and not self._pauses

    def _beat(self) -> Beat:
        return Beat(0, self.position, self._idle_s, time.time())

    def _suspect(self, beats: Heartbeats, ticks: Iterator[float]) -> None:
        """Read the heartbeats of all ranks and propose a decision, until there is one or the main thread goes on. Before the
        timeout, only silent ranks are missing."""
        before: list[Beat] | None = None
        last = beats.latest  # left over from an earlier suspicion
        listened = unanswered = 0.0
        beats.set_reading(True)
        for passed in ticks:
            if beats.decision is not None or not self._is_stuck():
                break
            listened += passed
            unanswered += passed
            now = beats.latest
            if now is None or now is last:
                if unanswered >= STORE_S:
                    self._end(self._without_store())
                continue
            last, unanswered = now, 0.0
            if before is None:
                before, listened = now, 0.0
            if listened >= LISTEN_S:
                waited_s = self._timeout_s if self._idle_s >= self._timeout_s else IDLE_S
                if waited_s == self._timeout_s or silent_ranks(before, now):
                    beats.propose(_decide(before, now, waited_s))
                else:
                    before, listened = now, 0.0
        beats.set_reading(False)

    def _describe(self, missing: MissingRanks) -> str:
        """The decision, from this rank's point of view."""
        if not missing.findings:
            return (
                f"all {self._env.world_size} ranks have been at {missing.where} for {missing.waited_s:g} s: no rank is "
                "behind, so the operation in which all wait hangs"
            )
        if missing.failed:
            ((rank, error),) = missing.findings.items()
            return (
                f"{self._names[rank]} failed at {missing.where}: {error} (its traceback is in its own log); this rank "
                f"{_whereabouts(self._beat())}"
            )
        parts = []
        for rank, finding in list(missing.findings.items())[:MOST_NAMED]:
            if rank == self._env.rank:
                parts.append(f"this rank {finding}, and was waited for in {missing.where}")
            else:
                absence = f"did not arrive in {missing.where} within {missing.waited_s:g} s"
                parts.append(f"{self._names[rank]} {absence}: it {finding}")
        more = len(missing.findings) - MOST_NAMED
        return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")

    def _without_store(self) -> str:
        of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        holder = "torchrun's process there" if of_torchrun else self._names[0]
        return (
            f"the job's store at MASTER_ADDR {os.environ['MASTER_ADDR']} does not answer: this host is cut off from it, or "
            f"{holder}, which holds it, has stopped (this rank {_whereabouts(self._beat())})"
        )

    def _end(self, report: str) -> NoReturn:
        """Log the report, write the stacks and the latest collectives, and end the process."""
        log, folder = _log()
        # A thread in C ends the process even if the main thread holds the lock of a log to which nothing can be written.
        faulthandler.dump_traceback_later(LAST_REPORT_S, exit=True, file=log)
        try:
            raise TimeoutError(report)  # raised, since torchrun's report shows the traceback
        except TimeoutError as error:
            get_error_handler().record_exception(error)
        logger.error(report)
        heading = f"The Python stacks of rank {self._env.rank} (pid {os.getpid()}), the latest call first:\n"
        os.write(log, heading.encode())
        faulthandler.dump_traceback(log)
        sys.stdout.flush()
        if self._beats is not None:
            if folder is not None:
                self._write_collectives(folder / FLIGHT_RECORDER_FOLDER / self._start)
            time.sleep(READ_DECISION_S)
        end_at_once(1)

    def _write_collectives(self, folder: Path) -> None:
        try:
            write_collectives(folder, self._env.rank, self._env.device)
        except Exception as error:  # torch's functions are internal, and the disk may be full: the process has to end
            logger.warning("the latest collectives were not written: %s: %s", type(error).__name__, error)
        else:
            logger.info(f"the latest collectives of each rank: torchfrtrace --allow-incomplete-ranks {folder}")


def _failure(error: BaseException | None) -> str | None:
    """The error of a rank that leaves alone; None if all ranks leave as this one does."""
    return None if leaves_together(error) else f"{type(error).__name__}: {one_line(str(error))[:MOST_OF_AN_ERROR]}"


def _decide(before: Sequence[Beat], now: Sequence[Beat], waited_s: float) -> MissingRanks:
    findings = {}
    for rank in missing_ranks(before, now):
        beat = now[rank]
        if beat.state == "failed":
            findings[rank] = "has failed (see its own log)"
        elif beat.number == before[rank].number:
            silence_s = max(LISTEN_S, time.time() - beat.clock)  # its host's clock may be ahead
            findings[rank] = f"has given no sign of life for {silence_s:.0f} s (stopped, or cut off)"
        else:
            findings[rank] = f"{_whereabouts(beat)} (its Python stacks are in its own log)"
    furthest = max(now, key=lambda beat: beat.reached)
    return MissingRanks("the end" if furthest.state == "left" else str(furthest.position), findings, waited_s)


def _whereabouts(beat: Beat) -> str:
    return f"has been at {beat.position} for {beat.idle_s:.0f} s"


def _log() -> tuple[int, Path | None]:
    """The descriptor of this rank's log, and the folder of the logs; stderr and None, if there is none."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler) and handler.stream is not None:
            return handler.stream.fileno(), Path(handler.baseFilename).parent
    return 2, None
