"""The time of an all-reduce, by algorithm and size (``python -m ddp.bench allreduce``).

Every algorithm of ddp/all_reduce/choice.py (hierarchical only with ``--hosts``) and the backend's own sum the same tensors in
the same processes, from 4 B to 100 MiB. For each size the algorithms take turns. A turn is a barrier followed by consecutive
all-reduces for at least 20 ms; its time is that of the slowest rank, divided by the number of all-reduces.

A line, alpha + beta * bytes, is fitted to each algorithm's medians (ddp/bench/alpha_beta.py). The bandwidth of the memory is
measured in the same processes: it bounds an all-reduce between processes that share memory.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from common.cli import option, parse
from common.distributed.process_group import DistEnv
from common.distributed.rank_logging import Progress
from common.distributed.worker_group import WorkerGroup
from common.errors import UsageError
from common.reporting.benchmark import CPU, run_alone, write_results
from common.reporting.benchmark_figures import plot_all_reduce
from common.reporting.machine import usable_cores
from common.reporting.run_directory import files_line
from common.reporting.timing import Spread, interleave, paired_ratio
from ddp.all_reduce import ALL_REDUCES
from ddp.all_reduce.base import AllReduce
from ddp.all_reduce.choice import build_all_reduce
from ddp.all_reduce.hierarchical import Hierarchical
from ddp.all_reduce.p2p import P2P
from ddp.bench.alpha_beta import AlphaBeta, bus_bandwidth, least_shared_memory_seconds

KI, MI = 1 << 10, 1 << 20
SIZES = (4, 64, KI, 4 * KI, 16 * KI, 64 * KI, 256 * KI, MI, 4 * MI, 16 * MI, 25 * MI, 100 * MI)
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
BACKEND, SHARED, HIERARCHICAL = "backend", "shared-memory", "hierarchical"
COPIED = f"{SHARED}, copied"  # the tensor lies elsewhere and is copied in and out
QUOTED = (4 * KI, 25 * MI)  # a small tensor, and DDP's default bucket
WARMUP = 1
TURN_S = 0.02  # least length of a turn
MEMORY_BYTES = 128 * MI  # of each tensor: far larger than the caches


@dataclass(frozen=True)
class AllReduceConfig:
    """Settings of ``ddp.bench allreduce``.

    :raises UsageError: for a size that is not a whole number of elements, or a number of ranks that hosts do not divide
    """

    ranks: int = option(2, "processes, each with one thread", minimum=2, maximum=64)
    algorithms: tuple[str, ...] = option(
        # On one host, hierarchical is shared memory.
        tuple(name for name in ALL_REDUCES if name not in (BACKEND, HIERARCHICAL)),
        "algorithms to compare with the backend's own",
        choices=[name for name in ALL_REDUCES if name != BACKEND],
    )
    hosts: int = option(
        1, "simulated hosts, with equally many ranks each, for hierarchical; more than 1 adds it", minimum=1
    )
    sizes: tuple[int, ...] = option(SIZES, "sizes of the tensors in bytes", minimum=2)
    dtype: str = option("float32", "element type of the tensors", choices=tuple(DTYPES))
    rounds: int = option(15, "measured rounds; in each, every algorithm takes one turn", minimum=2)
    output: Path = option(Path("runs/bench-allreduce"), "folder of the JSON and the figure")

    def __post_init__(self) -> None:
        element = DTYPES[self.dtype].itemsize
        for size in self.sizes:
            if size % element:
                raise UsageError(f"--sizes {size} is no multiple of the {element} bytes of a {self.dtype}")
        if len(self.sizes) < 2:
            raise UsageError(f"--sizes {self.sizes[0]}: give two or more, which a line needs")
        if self.ranks % self.hosts:
            raise UsageError(f"--hosts {self.hosts} does not divide --ranks {self.ranks}")
        object.__setattr__(self, "sizes", tuple(sorted(self.sizes)))
        if self.hosts > 1 and HIERARCHICAL not in self.algorithms:
            object.__setattr__(self, "algorithms", (*self.algorithms, HIERARCHICAL))


class AllReduceWorker:
    """The service of one rank: it holds every algorithm, and a tensor of the largest size for each.

    Algorithms that do not allocate memory of their own share one tensor. All tensors hold zeros: repeated sums cannot make
    them infinite or denormal, and denormal numbers would change the time.
    """

    def __init__(self, env: DistEnv, algorithms: Sequence[str], hosts: int, numel: int, dtype: torch.dtype) -> None:
        self._all_reduces = {name: build_all_reduce(name) for name in algorithms if name != HIERARCHICAL or hosts == 1}
        if hosts > 1:
            keys = [f"host {rank * hosts // env.world_size}" for rank in range(env.world_size)]
            self._all_reduces[HIERARCHICAL] = Hierarchical(P2P(), keys)
        plain = torch.zeros(numel, dtype=dtype)
        self._buffers = {
            name: all_reduce.allocate(numel, dtype, env.device) if _allocates(all_reduce) else plain
            for name, all_reduce in self._all_reduces.items()
        }
        if SHARED in algorithms:
            self._all_reduces[COPIED], self._buffers[COPIED] = self._all_reduces[SHARED], plain

    def all_reduce(self, name: str, numel: int, repetitions: int) -> float:
        """Seconds of one all-reduce, the mean over ``repetitions``. All ranks start together."""
        run, buffer = self._all_reduces[name].run, self._buffers[name][:numel]
        return _seconds(lambda: run(buffer), repetitions)

    def allocate(self) -> None:
        """Allocate two tensors for :meth:`copy` and :meth:`in_place`."""
        self._from, self._to = (torch.zeros(MEMORY_BYTES // 4) for _ in range(2))

    def copy(self) -> float:
        """Seconds to read MEMORY_BYTES and write as many elsewhere, as in McCalpin's STREAM."""
        return _seconds(lambda: self._to.copy_(self._from), 1)

    def in_place(self) -> float:
        """Seconds to read MEMORY_BYTES and write them back in place, as an all-reduce does."""
        return _seconds(lambda: self._from.mul_(1), 1)

    def close(self) -> None:
        del self._buffers
        for name, all_reduce in self._all_reduces.items():
            if name != COPIED:
                all_reduce.close()


def _allocates(all_reduce: AllReduce) -> bool:
    """Whether its buffers must lie in memory that it allocates."""
    return type(all_reduce).allocate is not AllReduce.allocate


def _seconds(work: Callable[[], object], repetitions: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(repetitions):
        work()
    return (time.perf_counter() - began) / repetitions


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


def main(argv: Sequence[str]) -> None:
    config = parse(AllReduceConfig, "ddp.bench allreduce", __doc__, argv)
    run_alone("ddp.bench allreduce", config.output, lambda: measure(config), lambda taken: report(config, *taken))


def measure(config: AllReduceConfig) -> tuple[list[AllReduceMeasurement], MemoryBandwidth]:
    """Start the ranks, let the algorithms take turns, and end the ranks. The backend's own algorithm comes first."""
    dtype = DTYPES[config.dtype]
    algorithms = (BACKEND, *config.algorithms)
    names = [*algorithms, *([COPIED] if SHARED in algorithms else [])]
    numel = max(config.sizes) // dtype.itemsize
    with WorkerGroup(config.ranks, AllReduceWorker, algorithms, config.hosts, numel, dtype, threads=1) as ranks:
        steps = len(config.sizes) * (config.rounds + WARMUP)
        with Progress(DistEnv.alone(CPU), "bench", steps) as progress:
            taken = {size: _measure_size(ranks, names, size, config, progress) for size in config.sizes}
        ranks.call("close")
        memory = _measure_memory(ranks, config.rounds)
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


def report(config: AllReduceConfig, measured: list[AllReduceMeasurement], memory: MemoryBandwidth) -> str:
    """Write the JSON and the figure, and return the summary to print."""
    bandwidths = {one.name: {size: one.bus_bandwidth(size) for size in config.sizes} for one in measured}
    # As a bus bandwidth, the limit does not depend on the size.
    limit = bus_bandwidth(1, least_shared_memory_seconds(1, config.ranks, memory.bandwidth), config.ranks)
    write_results(
        config.output / "allreduce.json",
        {
            "config": asdict(config),
            "memory_bytes_per_s": asdict(memory),
            "bus_bandwidth_limit_of_memory": limit,
            "algorithms": [
                {**asdict(one), "fit": asdict(one.fit), "bus_bandwidth": bandwidths[one.name]} for one in measured
            ],
        },
    )
    title = f"all-reduce, {config.ranks} ranks on {usable_cores()} cores, {config.dtype}"
    plot_all_reduce(
        config.output / "allreduce.png",
        {one.name: one.seconds for one in measured},
        {one.name: (one.fit.alpha, one.fit.beta) for one in measured},
        bandwidths,
        limit,
        {size: size_name(size) for size in config.sizes},
        title,
    )
    lines = [f"{title}; {config.rounds} rounds, median [quartiles]", *_table(config, measured), ""]
    lines += [*_fits(measured), "", *_comparisons(config, measured), *_memory(config, measured, memory, limit)]
    return "\n".join([*lines, files_line(config.output, ("allreduce.json", "allreduce.png"))])


def size_name(size: int) -> str:
    """``4 B``, ``64 KiB``, ``25 MiB``."""
    for unit, name in ((MI, "MiB"), (KI, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def _table(config: AllReduceConfig, measured: list[AllReduceMeasurement]) -> list[str]:
    backend = measured[0]
    lines = [f"{'':<26}{'us':>36}{'times as fast as backend':>28}{'GB/s':>9}{'bus GB/s':>10}"]
    for size in config.sizes:
        lines.append(size_name(size))
        for one in measured:
            microseconds = Spread.of([1e6 * seconds for seconds in one.seconds[size]])
            lines.append(
                f"  {one.name:<24}{f'{microseconds:,.1f}':>36}{f'{one.speedup(size, backend):.2f}':>28}"
                f"{1e-9 * size / one.median(size):>9.3f}{1e-9 * one.bus_bandwidth(size):>10.3f}"
            )
    return lines


def _fits(measured: list[AllReduceMeasurement]) -> list[str]:
    """For each algorithm: its latency, its bandwidth, and the distance of its times from the line."""
    lines = ["time = alpha + bytes / bandwidth, fitted to the medians:"]
    for one in measured:
        fit = one.fit
        size, error = max(zip(one.seconds, fit.errors, strict=True), key=lambda pair: abs(math.log1p(pair[1])))
        lines.append(
            f"  {one.name}: alpha {1e6 * fit.alpha:.1f} us, {fit.bandwidth / 1e9:.2f} GB/s; off by "
            f"{100 * fit.mean_error:.0f} % on average, and most at {size_name(size)}, where the line is "
            f"{1 + error:.2f} times the measured time"
        )
    return lines


def _comparisons(config: AllReduceConfig, measured: list[AllReduceMeasurement]) -> list[str]:
    """The fastest algorithm at the smallest and the largest size, and shared memory at the two quoted sizes."""
    backend, *others = measured
    by_name = {one.name: one for one in measured}
    lines = []
    for size in (min(config.sizes), max(config.sizes)):
        best = min(others, key=lambda one: one.median(size))
        beaten = best.median(size) < backend.median(size)
        words = "the fastest is" if beaten else "the backend is the fastest; next is"
        lines.append(f"{size_name(size)}: {words} {_against(best, backend, size)}")
    quoted = [size for size in QUOTED if size in config.sizes and SHARED in by_name]
    return lines + [f"{size_name(size)}: {_against(by_name[SHARED], backend, size)}" for size in quoted]


def _against(one: AllReduceMeasurement, backend: AllReduceMeasurement, size: int) -> str:
    return (
        f"{one.name}, with {1e6 * one.median(size):,.1f} us where the backend takes {1e6 * backend.median(size):,.1f}: "
        f"{one.speedup(size, backend):.2f} times as fast"
    )


def _memory(
    config: AllReduceConfig, measured: list[AllReduceMeasurement], memory: MemoryBandwidth, limit: float
) -> list[str]:
    copy, in_place = (Spread.of([1e-9 * value for value in values]) for values in (memory.copy, memory.in_place))
    words = (
        f"memory, all ranks at once, bytes read and written: copying {copy:.1f} GB/s, in place {in_place:.1f} GB/s. An "
        f"all-reduce in shared memory reads and writes each rank's tensor once. For tensors larger than the caches its bus "
        f"bandwidth is at most {1e-9 * limit:.1f} GB/s"
    )
    largest = max(config.sizes)
    uncached = [one for one in measured if one.name == SHARED and largest * config.ranks >= MEMORY_BYTES]
    share = "{}: {} reaches {:.0f} % of this limit"
    return [
        words,
        *(share.format(size_name(largest), SHARED, 100 * one.bus_bandwidth(largest) / limit) for one in uncached),
    ]
