"""The ranks' signs of life in the job's store: where each is, and that its process still runs. See common/resilience/watchdog.py."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from common.distributed.process_group import DistEnv

BEAT_S = 1.0  # between two beats
STORE_S = 3.0  # for an answer of the store, whose process may be the one that stopped


class Position(NamedTuple):
    """Where a rank's main thread is. All ranks pass the same positions in the same order."""

    step: int
    move: int  #: its number within the step: micro-steps come to each phase several times
    phase: str

    def __str__(self) -> str:
        return f"{self.phase} of step {self.step}"


class Beat(NamedTuple):
    """A rank's sign of life."""

    number: int  #: counts its beats
    position: Position
    idle_s: float = 0.0  #: for how long its main thread has been there
    clock: float = 0.0  #: when it was sent, in seconds since 1970
    state: str = "here"  #: in its last beat "left", or "failed" after an exception

    @classmethod
    def parse(cls, text: bytes) -> Beat:
        """What was sent as JSON."""
        number, position, *rest = json.loads(text)
        return cls(number, Position(*position), *rest)

    @property
    def reached(self) -> tuple[bool, int, int]:
        """Compares as larger the further the rank is; one that has left is past everything."""
        return self.state == "left", self.position.step, self.position.move


class Verdict(NamedTuple):
    """Who is missing."""

    where: str  #: the furthest position of a rank
    late: dict[int, str]  #: what is known of each missing rank


class Heartbeats:
    """This rank's beats sent and, when asked for, those of all ranks read, by a thread, since the store may never answer.

    To make one is no collective, but all ranks must have made theirs before one starts: then all keys exist, and no reader
    waits for one. The last rank that leaves deletes them.

    :param key: what the keys begin with; no other object's, since torchrun's store outlives a job
    :param beat: makes a beat of what this rank does; its number and state are set here
    """

    verdict: Verdict | None = None  #: the first that a rank has proposed
    reading: list[Beat] | None = None  #: a beat of each rank; another list each time

    def __init__(self, key: str, env: DistEnv, beat: Callable[[], Beat]) -> None:
        self._beat = beat
        self._number = 0
        self._state = "here"
        self._proposal: str | None = None
        self._listening = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._exchange, name="heartbeats", daemon=True)
        self._beat_keys = [f"{key}/{rank}" for rank in range(env.world_size)]
        self._own_key, self._verdict_key, self._left_key = self._beat_keys[env.rank], f"{key}/verdict", f"{key}/left"
        self._job: Any = dist.distributed_c10d._get_default_store()
        self._send(self._job)
        if env.is_main:
            self._job.set(self._verdict_key, "")

    def start(self) -> None:
        """Send a beat every ``BEAT_S`` from now on, and look for a verdict."""
        self._thread.start()

    def listen(self, listening: bool) -> None:
        """Read the beats of all ranks from now on, or no longer."""
        self._listening = listening
        self._wake.set()

    def propose(self, verdict: Verdict) -> None:
        """It is the verdict, unless another rank's came first."""
        self._proposal = json.dumps(verdict)
        self._wake.set()

    def close(self, state: str) -> Verdict | None:
        """Send the last beat; returns the verdict, if there is one by then."""
        self._state = state
        self._wake.set()
        self._thread.join(STORE_S)
        return self.verdict

    def _exchange(self) -> None:
        with contextlib.suppress(RuntimeError):  # nobody serves the store any more
            store = self._job.clone()  # the main thread may wait for something in the store on the other connection
            while True:
                state = self._send(store)
                self._read(store)
                if state != "here":
                    break
                self._wake.wait(BEAT_S / 2 if self._listening else BEAT_S)
                self._wake.clear()
            if state == "left" and store.add(self._left_key, 1) == len(self._beat_keys):
                for key in (*self._beat_keys, self._verdict_key, self._left_key):
                    store.delete_key(key)

    def _send(self, store: Any) -> str:
        self._number += 1
        beat = self._beat()._replace(number=self._number, state=self._state)
        store.set(self._own_key, json.dumps(beat))
        return beat.state

    def _read(self, store: Any) -> None:
        if self._proposal is not None:
            store.compare_set(self._verdict_key, "", self._proposal)
        verdict, *beats = store.multi_get([self._verdict_key, *(self._beat_keys if self._listening else ())])
        if beats:
            self.reading = [Beat.parse(beat) for beat in beats]
        if verdict:
            where, late = json.loads(verdict)
            self.verdict = Verdict(where, {int(rank): finding for rank, finding in late.items()})
