"""Times the named parts of a step."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from common.benchmarking.timing import synchronize


class Stopwatch:
    """Sums the seconds of named blocks. The time of a nested block counts for the inner block only.

    Use as ``with stopwatch("scatter"): ...``, from any thread, if the thread of the outer block waits meanwhile.

    :param devices: on GPUs, each block begins and ends with a synchronization; otherwise its work would be timed in a later
        block. This slows the whole call, so the total time must come from a run without a stopwatch.
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
        """Return the sums so far, and reset them."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken

    def _account(self) -> None:
        """Add the time since a block last began or ended to the innermost open block."""
        synchronize(self._devices)
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now
