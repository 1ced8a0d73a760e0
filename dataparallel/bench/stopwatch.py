"""Where the time of a step goes."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from common.reporting.timing import synchronize


class Stopwatch:
    """Sums the seconds of named blocks; those of a block within another count for the inner one alone.

    ``with stopwatch("scatter"): ...``, from any thread, as long as the outer block's waits meanwhile.

    :param devices: on GPUs, each block begins and ends when all is done that was queued before, or the time of one would be
        found in the next; that alone makes the whole slower, so it is not the run whose total counts
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._devices = devices
        self._open: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._account()
        self._open.append(name)
        try:
            yield
        finally:
            self._account()
            self._open.pop()

    def take(self) -> dict[str, float]:
        """The sums so far; the next ones begin at zero."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken

    def _account(self) -> None:
        """What has passed since the last beginning or end belongs to the innermost block."""
        synchronize(self._devices)
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now
