"""Slow storage on a fast disk: every read waits, for a time that is a pure function of the file name.

Object stores and network file systems answer in tens of milliseconds, and a few requests take much longer. Their latencies
are about log-normal, and so are the waits here, around the given median.
"""

from __future__ import annotations

import math
import statistics
import time

from common.randomness import uniform
from dataloading.dataset.storage import Storage

SIGMA = 0.3  # of the wait's logarithm: one in twenty takes 1.6 times the median or more


def delay_s(latency_ms: float, name: str) -> float:
    """Seconds that the request for a file waits; ``latency_ms`` is the median over all names."""
    (share,) = uniform(1, 0, "latency", name).tolist()  # a multiple of 2**-24, below 1
    return latency_ms / 1000 * math.exp(SIGMA * statistics.NormalDist().inv_cdf(share + 2.0**-25))


class DelayedStorage:
    """A storage whose files take ``latency_ms`` longer."""

    def __init__(self, storage: Storage, latency_ms: float) -> None:
        self.root, self._storage, self._latency_ms = storage.root, storage, latency_ms

    def names(self) -> list[str]:
        return self._storage.names()

    def read(self, name: str) -> bytes:
        time.sleep(delay_s(self._latency_ms, name))
        return self._storage.read(name)
