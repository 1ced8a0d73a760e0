"""The times of all algorithms on the ranks, taken in turns, and the bandwidth of the memory."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from common.distributed.process_group import DistEnv
from common.distributed.rank_logging import Progress
from common.distributed.worker_group import WorkerGroup
from common.reporting.benchmark import CPU
from common.reporting.clock import Clock, clock_of
from common.reporting.timing import Spread, interleave, paired_ratio
from ddp.all_reduce.base import AllReduce
from ddp.all_reduce.choice import build_all_reduce
from ddp.all_reduce.hierarchical import Hierarchical
from ddp.all_reduce.p2p import P2P
from ddp.bench.allreduce.alpha_beta import AlphaBeta, bus_bandwidth
from ddp.bench.allreduce.config import BACKEND, DTYPES, HIERARCHICAL, MI, SHARED, AllReduceConfig, size_name

COPIED = f"{SHARED}, copied"  # the tensor lies elsewhere and is copied in and out
WARMUP = 1
TURN_S = 0.02  # least length of a turn
MEMORY_BYTES = 128 * MI  # of each tensor: far larger than the caches


class AllReduceWorker:
    """The service of one rank: it holds every algorithm, and a tensor of the largest size for each.

    Algorithms that do not allocate memory of their own share one tensor. All tensors hold zeros: repeated sums cannot make
    them infinite or denormal, and denormal numbers would change the time.
    """

    def __init__(self, env: DistEnv, algorithms: Sequence[str], hosts: int, numel: int, dtype: torch.dtype) -> None:
        self._clock = clock_of(env.device)
        self._all_reduces = {name: build_all_reduce(name) for name in algorithms if name != HIERARCHICAL or hosts == 1}
        if hosts > 1:
            keys = [f"host {rank * hosts // env.world_size}" for rank in range(env.world_size)]
            self._all_reduces[HIERARCHICAL] = Hierarchical(P2P(), keys)
        plain = torch.zeros(numel, dtype=dtype, device=env.device)
        self._buffers = {
            name: all_reduce.allocate(numel, dtype, env.device) if _allocates(all_reduce) else plain
            for name, all_reduce in self._all_reduces.items()
        }
        if SHARED in algorithms:
            self._all_reduces[COPIED], self._buffers[COPIED] = self._all_reduces[SHARED], plain

    def all_reduce(self, name: str, numel: int, repetitions: int) -> float:
        """Seconds of one all-reduce, the mean over ``repetitions``. All ranks start together."""
        run, buffer = self._all_reduces[name].run, self._buffers[name][:numel]
        return _seconds(self._clock, lambda: run(buffer), repetitions)

    def allocate(self) -> None:
        """Allocate two tensors for :meth:`copy` and :meth:`in_place`."""
        self._from, self._to = (torch.zeros(MEMORY_BYTES // 4) for _ in range(2))

    def copy(self) -> float:
        """Seconds to read MEMORY_BYTES and write as many elsewhere, as in McCalpin's STREAM."""
        return _seconds(self._clock, lambda: self._to.copy_(self._from), 1)

    def in_place(self) -> float:
        """Seconds to read MEMORY_BYTES and write them back in place, as an all-reduce does."""
        return _seconds(self._clock, lambda: self._from.mul_(1), 1)

    def close(self) -> None:
        del self._buffers
        for name, all_reduce in self._all_reduces.items():
            if name != COPIED:
                all_reduce.close()


def _allocates(all_reduce: AllReduce) -> bool:
    """Whether its buffers must lie in memory that it allocates."""
    return type(all_reduce).allocate is not AllReduce.allocate


def _seconds(clock: Clock, work: Callable[[], object], repetitions: int) -> float:
    dist.barrier()
    clock.start()
    began = clock.stamp()
    for _ in range(repetitions):
        work()
    ended = clock.stamp()
    return (clock.seconds(ended) - clock.seconds(began)) / repetitions


@dataclass(frozen=True)
class AllReduceMeasurement:
    """The times of one algorithm.

    :param seconds: of one all-reduce, by size in bytes; one entry per round
    """

    name: str
    ranks: int
    seconds: Mapping[int, list[float]]

    @functools.cached_property
    def fit(self) -> AlphaBeta:
        return AlphaBeta.fit(list(self.seconds), [self.median(size) for size in self.seconds])

    def median(self, size: int) -> float:
        return statistics.median(self.seconds[size])

    def bus_bandwidth(self, size: int) -> float:
        return bus_bandwidth(size, self.median(size), self.ranks)

    def speedup(self, size: int, backend: AllReduceMeasurement) -> Spread:
        """How many times as fast as the backend's, round by round."""
        return paired_ratio(backend.seconds[size], self.seconds[size])


@dataclass(frozen=True)
class MemoryBandwidth:
    """Bytes per second that memory reads and writes for all ranks together; one entry per round.

    A copy appears slower than work in place: most processors also read memory before they overwrite it, and these reads are
    not counted.
    """

    copy: list[float]
    in_place: list[float]

    @property
    def bandwidth(self) -> float:
        """The greater of the two medians."""
        return max(statistics.median(self.copy), statistics.median(self.in_place))


def measure(config: AllReduceConfig) -> tuple[list[AllReduceMeasurement], MemoryBandwidth | None]:
    """Start the ranks, let the algorithms take turns, and end the ranks. The backend's own algorithm comes first.

    :returns: also the bandwidth of the host's memory, if that is where the tensors are
    """
    dtype = DTYPES[config.dtype]
    algorithms = (BACKEND, *config.algorithms)
    names = [*algorithms, *([COPIED] if SHARED in algorithms else [])]
    numel = max(config.sizes) // dtype.itemsize
    arguments, backend = (algorithms, config.hosts, numel, dtype), config.placement.backend
    with WorkerGroup(
        config.ranks, AllReduceWorker, *arguments, device=config.device, backend=backend, threads=1
    ) as ranks:
        steps = len(config.sizes) * (config.rounds + WARMUP)
        with Progress(DistEnv.alone(CPU), "bench", steps) as progress:
            taken = {size: _measure_size(ranks, names, size, config, progress) for size in config.sizes}
        ranks.call("close")
        memory = _measure_memory(ranks, config.rounds) if config.device == "cpu" else None
    return [
        AllReduceMeasurement(name, config.ranks, {size: taken[size][name] for size in config.sizes}) for name in names
    ], memory


def _measure_size(
    ranks: WorkerGroup, names: Sequence[str], size: int, config: AllReduceConfig, progress: Progress
) -> dict[str, list[float]]:
    turns = {name: _turn(ranks, name, size // DTYPES[config.dtype].itemsize) for name in names}
    return interleave(turns, config.rounds, WARMUP, lambda _: progress.advance(1, size_name(size)))


def _turn(ranks: WorkerGroup, name: str, numel: int) -> Callable[[], float]:
    """A turn with enough all-reduces to take at least TURN_S."""
    repetitions = 1
    # The shorter of two attempts: a disturbed one must not end the search.
    while repetitions * min(_slowest(ranks, "all_reduce", name, numel, repetitions) for _ in range(2)) < TURN_S:
        repetitions *= 2
    return functools.partial(_slowest, ranks, "all_reduce", name, numel, repetitions)


def _measure_memory(ranks: WorkerGroup, rounds: int) -> MemoryBandwidth:
    ranks.call("allocate")
    moved = 2 * MEMORY_BYTES * len(ranks.pids)  # read and written
    turns = {method: functools.partial(_slowest, ranks, method) for method in ("copy", "in_place")}
    seconds = interleave(turns, rounds, WARMUP)
    return MemoryBandwidth(**{method: [moved / taken for taken in seconds[method]] for method in turns})


def _slowest(ranks: WorkerGroup, method: str, *arguments: object) -> float:
    """Call a method on all ranks at once, and return the seconds of the slowest."""
    seconds: list[float] = ranks.call(method, *arguments)
    return max(seconds)
