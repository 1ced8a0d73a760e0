"""One turn of a loader: how long each of its batches is waited for, and how long it is used.

A turn is a generator. Whoever asks for its batches trains on them, or forgets them; so the same code times a loader alone, and a
loader within the loop of somebody's script. It imports torch alone, since it also runs in the processes of such a script.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import signal
import statistics
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any


class NoTurn(Exception):
    """No batch came in time, or too few came."""


class ScriptEnded(Exception):
    """The script has ended, or does not answer; the text says why."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """The times of one turn.

    :param waits: seconds for each batch; the first with the start of the workers
    :param uses: seconds for which each batch was used
    :param head: so many batches come before all workers are under way
    :param counted: so many batches after the head are timed as the steady part
    :param end_s: seconds from the last batch to the end of the epoch; 0 if the turn ended before it
    :param busy_s: processor seconds of the waiting thread in ``waits``
    """

    waits: list[float]
    uses: list[float]
    head: int
    counted: int
    end_s: float
    busy_s: float

    @property
    def head_s(self) -> float:
        """Seconds from asking for an iterator until the head has been used."""
        return sum(self.waits[: self.head]) + sum(self.uses[: self.head])

    @property
    def steady_s(self) -> float:
        """Seconds of the steady part."""
        steady = slice(self.head, self.head + self.counted)
        return sum(self.waits[steady]) + sum(self.uses[steady])

    @property
    def step_s(self) -> float:
        """Seconds per batch of the steady part."""
        return self.steady_s / self.counted

    def epoch_s(self, steps: float) -> float:
        """Seconds of an epoch of so many steps.

        :param steps: math.inf for a loader without an end, whose start does not matter; then seconds per step
        """
        if math.isinf(steps):
            return self.step_s
        return self.head_s + self.end_s + (steps - self.head) * self.step_s


def take_turn(
    begin: Callable[[], Iterator[Any]],
    head: int,
    counted: int,
    *,
    rest: bool,
    patience_s: float = 0.0,
    interrupted: Callable[[], bool] = lambda: False,
) -> Generator[Any, None, Turn]:
    """Yield a loader's batches; return the times.

    :param begin: makes the iterator
    :param head: batches that come before all workers are under way
    :param counted: batches of the steady part; fewer if the iterator ends before
    :param rest: whether to go on to the iterator's end. Persistent workers are idle only then
    :param patience_s: seconds after which a batch does not come any more; 0 for no limit
    :param interrupted: whether the last use of a batch had something else in it, such as the end of an epoch; it is not counted
    :raises NoTurn: when no batch came in time, or the iterator ended too soon
    """
    waits: list[float] = []
    uses: list[float] = []
    asked, busy = time.perf_counter(), time.thread_time()
    with in_time(patience_s):
        iterator = begin()
    end_s = busy_s = 0.0
    try:
        while True:
            with in_time(patience_s):
                batch = next(iterator, iterator)
            came = time.perf_counter()
            busy_s += time.thread_time() - busy
            if batch is iterator:
                end_s = came - asked
                break
            waits.append(came - asked)
            yield batch
            del batch
            asked, busy = time.perf_counter(), time.thread_time()
            uses.append(statistics.fmean(uses) if interrupted() and uses else asked - came)
            if len(waits) == head + counted and not rest:
                break
    except NoTurn:
        for worker in getattr(iterator, "_workers", ()):
            worker.kill()
        raise
    finally:
        if not rest and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
    head = min(head, max(1, len(waits) - 1))
    counted = min(counted, len(waits) - head)
    if counted < 1:
        raise NoTurn(f"the loader gave {len(waits)} batches, which are too few to time")
    return Turn(waits, uses, head, counted, end_s, busy_s)


def alone(turn: Generator[Any, None, Turn], use: Callable[[int, Any], object] = lambda *_: None) -> Turn:
    """Ask for a turn's batches, without training on them.

    :param use: is called with the number of each batch, and the batch
    """
    for number in itertools.count():
        try:
            use(number, next(turn))
        except StopIteration as end:
            measured: Turn = end.value
            return measured
    raise AssertionError


@contextlib.contextmanager
def in_time(seconds: float) -> Iterator[None]:
    """A block that is left by :class:`NoTurn` after so many seconds, 0 for none; only in the main thread, where signals arrive."""
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise NoTurn(f"no batch in {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def one_line(error: Exception) -> str:
    """An error's type and the last line of its text: one of a worker brings the whole traceback there."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"
