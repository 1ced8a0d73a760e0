"""Models of an all-reduce's time: the alpha-beta line, the bus bandwidth, and the limit that memory sets.

In the alpha-beta model n bytes take alpha + beta * n seconds. Alpha is the latency, which dominates for small tensors;
1 / beta is the bandwidth, which dominates for large ones. Sources: Hockney, "The communication challenge for MPP: Intel
Paragon and Meiko CS-2", Parallel Computing 20(3), 1994; Thakur, Rabenseifner, Gropp, "Optimization of Collective
Communication Operations in MPICH", IJHPCA 19(1), 2005.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class AlphaBeta:
    """A line through times.

    :param alpha: seconds
    :param beta: seconds per byte
    :param mean_error: the mean of the magnitudes of (line - time) / time
    """

    alpha: float
    beta: float
    mean_error: float

    @classmethod
    def fit(cls, sizes: Sequence[int], seconds: Sequence[float]) -> AlphaBeta:
        """The line with the least sum of squared relative errors, where neither alpha nor beta is negative.

        Errors are relative, so that the time of 4 B weighs as much as that of 100 MiB. Squares are sensitive to outliers:
        pass medians.

        :param sizes: bytes, above 0, at least two different ones
        :param seconds: for each size, above 0
        """
        bytes_, times = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
        columns = np.stack([np.ones_like(bytes_), bytes_]) / times
        scales = np.linalg.norm(columns, axis=1)  # of similar size, both parts are found to full precision
        columns /= scales[:, None]
        line = np.linalg.lstsq(columns.T, np.ones_like(times), rcond=None)[0]
        if line.min() < 0:  # then the best allowed line has one part only: the one that leaves the smaller error
            projections = columns.sum(axis=1)
            line = np.where(projections == projections.max(), projections, 0.0)
        alpha, beta = (line / scales).tolist()
        return cls(alpha, beta, float(np.mean(np.abs((alpha + beta * bytes_) / times - 1))))

    @property
    def bandwidth(self) -> float:
        """Bytes per second of large tensors; infinite where the times do not grow with the size."""
        return 1 / self.beta if self.beta else math.inf


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Bytes per second that each rank sends in an all-reduce of ``size`` bytes that sends the minimum.

    Each of ``size`` bytes needs 2 (ranks - 1) transfers, divided among all ranks. So this number can be compared with the
    bandwidth of the links at any number of ranks; ``size / seconds``, the algorithm's bandwidth, cannot. Defined in
    nccl-tests, doc/PERFORMANCE.md: "busbw".
    """
    return size / seconds * 2 * (ranks - 1) / ranks


def shared_memory_limit(ranks: int, memory_bandwidth: float) -> float:
    """The highest bus bandwidth of an all-reduce in memory that all ranks share, of more bytes than the caches hold.

    Each rank's tensor must be read once, and the sum written to it once: 2 * ranks * size bytes.

    :param memory_bandwidth: bytes per second, of all ranks together
    """
    return memory_bandwidth * (ranks - 1) / ranks**2
