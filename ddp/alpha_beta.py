"""What an all-reduce should take: the alpha-beta model of its time, bus bandwidth, and the memory's limit.

In the alpha-beta model (Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing
20(3), 1994; Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005)
n bytes take alpha + beta * n seconds: alpha is the latency, which small tensors pay, and 1 / beta the bandwidth, which large
ones get.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class AlphaBeta:
    """A line through times.

    :param alpha: seconds; :param beta: seconds per byte
    :param errors: of each time that it was fitted to, by size: (line - time) / time
    """

    alpha: float
    beta: float
    errors: tuple[float, ...]

    @classmethod
    def fit(cls, sizes: Sequence[int], seconds: Sequence[float]) -> AlphaBeta:
        """The line, with neither alpha nor beta negative, that has the least sum of squared relative errors.

        Relative, or 100 MiB alone would decide about both: so 4 B count as much. Squares are at the mercy of single times
        that went wrong: give medians.

        :param sizes: bytes, at least two different ones; :param seconds: for each size, above 0
        """
        times = np.asarray(seconds, np.float64)
        columns = np.stack(
            [1 / times, np.asarray(sizes) / times], axis=1
        )  # columns @ (alpha, beta): the line / the times
        both = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)[0]
        # Where one would be negative, the best line lies on the edge: that one is 0, and the other fitted by itself.
        edges = np.diag(columns.sum(axis=0) / (columns**2).sum(axis=0))
        allowed = [both] if (both >= 0).all() else list(edges)
        alpha, beta = min(allowed, key=lambda line: float(((columns @ line - 1) ** 2).sum()))
        return cls(float(alpha), float(beta), tuple((columns @ (alpha, beta) - 1).tolist()))

    def seconds(self, size: float) -> float:
        """For ``size`` bytes."""
        return self.alpha + self.beta * size

    @property
    def mean_error(self) -> float:
        """The mean of the errors' magnitudes."""
        return float(np.mean(np.abs(self.errors)))


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Bytes per second that each rank sends, as it receives, in an all-reduce of ``size`` bytes that sends no byte too many.

    Each of ``size`` bytes needs 2 (ranks - 1) transfers, which all ranks share. Whatever the number of ranks, this can be
    compared with what the links can carry; ``size / seconds``, the algorithm's bandwidth, cannot. Defined in nccl-tests,
    doc/PERFORMANCE.md: "busbw".
    """
    return size / seconds * 2 * (ranks - 1) / ranks


def least_shared_memory_seconds(size: int, ranks: int, memory_bandwidth: float) -> float:
    """The least time of an all-reduce in memory that all ranks share, of more bytes than the caches hold.

    Each of the ranks' tensors must be read once and, as the sum, be written once: 2 * ranks * size bytes, at
    ``memory_bandwidth`` bytes per second, of all ranks together.
    """
    return 2 * ranks * size / memory_bandwidth
