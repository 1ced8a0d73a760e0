"""What an all-reduce should take: the alpha-beta model of its time, bus bandwidth, and the memory's limit.

In the alpha-beta model (Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing
20(3), 1994; Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005)
n bytes take alpha + beta * n seconds: alpha is the latency, which small tensors pay, and 1 / beta the bandwidth, which large
ones get.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MARGIN = math.log(1e4)


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
        """The line with the least sum of squares of log(line / time); alpha and beta are above 0.

        A plain sum of squares would leave 4 B no say beside 100 MiB. One of relative errors prefers lines that are too low,
        for which no error is beyond 100 %, wherever the times are no line; here half as long is as wrong as twice as long.
        Where they are one, all agree. Squares are at the mercy of single times that went wrong: give medians.

        :param sizes: bytes, above 0 and at least two different ones; :param seconds: for each size, above 0
        """
        log_sizes, log_seconds = np.log(np.asarray(sizes, np.float64)), np.log(np.asarray(seconds, np.float64))
        # With knee = alpha / beta, the size at which both cost the same, log(line) = log(beta) + log(knee + size). The best
        # beta for a knee is a mean, and what is left a variance; a knee far from all sizes is as good as 0 or infinity.
        low, high = log_sizes.min() - MARGIN, log_sizes.max() + MARGIN
        for _ in range(4):  # each time 256 times as fine
            log_knees = np.linspace(low, high, 513)
            log_betas = log_seconds - np.logaddexp(log_knees[:, None], log_sizes)
            best = int(log_betas.var(axis=1).argmin())
            low, high = log_knees[max(best - 1, 0)], log_knees[min(best + 1, 512)]
        beta = math.exp(log_betas[best].mean())
        alpha = beta * math.exp(log_knees[best])
        errors = (alpha + beta * np.asarray(sizes)) / np.asarray(seconds) - 1
        return cls(alpha, beta, tuple(errors.tolist()))

    def seconds(self, size: float) -> float:
        """For ``size`` bytes."""
        return self.alpha + self.beta * size

    @property
    def bandwidth(self) -> float:
        """Bytes per second of large tensors."""
        return 1 / self.beta

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
