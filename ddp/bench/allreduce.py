"""What does an all-reduce take, by which algorithm, for how many bytes? (``python -m ddp.bench allreduce``)

Every algorithm of ddp/all_reduce/choice.py, and the backend's own, sum the same tensors in the same processes, from 4 B to 100 MiB.
For each size they take turns. A turn is a barrier and then as many all-reduces, one after the other, as take 20 ms; its time
is the slowest rank's, divided by their number.

A line, alpha + beta * bytes, is fitted to each algorithm's medians: see ddp/bench/alpha_beta.py. The memory's bandwidth is measured
in the same processes; it is what bounds an all-reduce between processes that share it.
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
from common.distributed.process_group import DistEnv, require_alone
from common.distributed.rank_logging import Progress, rank_logging
from common.distributed.worker_group import WorkerGroup
from common.errors import UsageError
from common.reporting.benchmark_figures import plot_all_reduce
from common.reporting.machine import describe_machine, usable_cores
from common.reporting.run_directory import prepare_output, results_in, write_json
from common.reporting.timing import Spread, interleave, paired_ratio
from ddp.all_reduce.algorithms import AllReduce
from ddp.all_reduce.choice import ALL_REDUCES, build_all_reduce
from ddp.all_reduce.hierarchical import Hierarchical
from ddp.all_reduce.p2p import P2P
from ddp.bench.alpha_beta import AlphaBeta, bus_bandwidth, least_shared_memory_seconds

KI, MI = 1 << 10, 1 << 20
SIZES = (4, 64, KI, 4 * KI, 16 * KI, 64 * KI, 256 * KI, MI, 4 * MI, 16 * MI, 25 * MI, 100 * MI)
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
BACKEND, SHARED, HIERARCHICAL = "backend", "shared-memory", "hierarchical"
COPIED = f"{SHARED}, copied"  # of a tensor that lies elsewhere
QUOTED = (4 * KI, 25 * MI)  # a small tensor, and DDP's default bucket
WARMUP = 1
TURN_S = 0.02
MEMORY_BYTES = 128 * MI  # of each tensor: far more than caches hold


@dataclass(frozen=True)
class AllReduceConfig:
    """Settings of ``ddp.bench allreduce``.

    :raises UsageError: for a size that is not a whole number of elements, or ranks that hosts do not divide
    """

    ranks: int = option(2, "processes, each with one thread", minimum=2, maximum=64)
    algorithms: tuple[str, ...] = option(
        tuple(name for name in ALL_REDUCES if name not in (BACKEND, HIERARCHICAL)),  # on one host that is shared memory
        "what is compared with the backend's own",
        choices=[name for name in ALL_REDUCES if name != BACKEND],
    )
    hosts: int = option(1, "of the ranks, as many on each, in the eyes of hierarchical; more than 1 adds it", minimum=1)
    sizes: tuple[int, ...] = option(SIZES, "of the tensors, in bytes", minimum=2)
    dtype: str = option("float32", "of the tensors' elements", choices=tuple(DTYPES))
    rounds: int = option(15, "rounds that count; in each, all algorithms take their turn", minimum=2)
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


class Worker:
    """What a rank does: it has every algorithm, and a tensor of the largest size for each.

    Algorithms that want no memory of their own share one tensor. Whatever its size, a tensor holds zeros: no number of sums
    makes them infinite, or a processor's handling of tiny numbers a part of the time.
    """

    def __init__(self, env: DistEnv, algorithms: Sequence[str], hosts: int, numel: int, dtype: torch.dtype) -> None:
        self._all_reduces = {name: build_all_reduce(name) for name in algorithms if name != HIERARCHICAL or hosts == 1}
        if hosts > 1:
            keys = [f"host {rank * hosts // env.world_size}" for rank in range(env.world_size)]
            self._all_reduces[HIERARCHICAL] = Hierarchical(P2P(), keys)
        plain = torch.zeros(numel, dtype=dtype)
        self._buffers = {
            name: all_reduce.allocate(numel, dtype, env.device) if _has_memory(all_reduce) else plain
            for name, all_reduce in self._all_reduces.items()
        }
        if SHARED in algorithms:
            self._all_reduces[COPIED], self._buffers[COPIED] = self._all_reduces[SHARED], plain

    def all_reduce(self, name: str, numel: int, repetitions: int) -> float:
        """Seconds of one, the mean of as many as are given, from a common start."""
        run, buffer = self._all_reduces[name].run, self._buffers[name][:numel]
        return _seconds(lambda: run(buffer), repetitions)

    def allocate(self) -> None:
        """Two tensors for :meth:`copy` and :meth:`in_place`."""
        self._from, self._to = (torch.zeros(MEMORY_BYTES // 4) for _ in range(2))

    def copy(self) -> float:
        """Seconds in which MEMORY_BYTES are read and as many are written, as in McCalpin's STREAM."""
        return _seconds(lambda: self._to.copy_(self._from), 1)

    def in_place(self) -> float:
        """Seconds in which MEMORY_BYTES are read, and written where they were read, as an all-reduce does."""
        return _seconds(lambda: self._from.mul_(1), 1)

    def close(self) -> None:
        del self._buffers
        for name, all_reduce in self._all_reduces.items():
            if name != COPIED:
                all_reduce.close()


def _has_memory(all_reduce: AllReduce) -> bool:
    """Whether its buffers lie in memory of its own."""
    return type(all_reduce).allocate is not AllReduce.allocate


def _seconds(work: Callable[[], object], repetitions: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(repetitions):
        work()
    return (time.perf_counter() - began) / repetitions


@dataclass(frozen=True)
class Measured:
    """An algorithm's times.

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

    def speedup(self, size: int, backend: Measured) -> Spread:
        """How many times as fast as the backend's, round by round."""
        return paired_ratio(backend.seconds[size], self.seconds[size])


@dataclass(frozen=True)
class Memory:
    """What the memory moves for all ranks at once, in bytes per second, reading and writing; one entry per round.

    Copying moves less than work in place: most processors read memory also before they overwrite it, which nobody counts.
    """

    copy: list[float]
    in_place: list[float]

    @property
    def bandwidth(self) -> float:
        """The greater of the two medians."""
        return max(statistics.median(self.copy), statistics.median(self.in_place))


def main(argv: Sequence[str]) -> None:
    config = parse(AllReduceConfig, "ddp.bench allreduce", __doc__, argv)
    require_alone("ddp.bench allreduce")
    with rank_logging(DistEnv.alone(torch.device("cpu"))):
        prepare_output(config.output)
        measured, memory = measure(config)
        with results_in(config.output):
            print(report(config, measured, memory))


def measure(config: AllReduceConfig) -> tuple[list[Measured], Memory]:
    """Start the ranks, let the algorithms take turns, and end them; the backend's own comes first."""
    dtype = DTYPES[config.dtype]
    algorithms = (BACKEND, *config.algorithms)
    names = [*algorithms, *([COPIED] if SHARED in algorithms else [])]
    numel = max(config.sizes) // dtype.itemsize
    with WorkerGroup(config.ranks, Worker, algorithms, config.hosts, numel, dtype, threads=1) as ranks:
        steps = len(config.sizes) * (config.rounds + WARMUP)
        with Progress(DistEnv.alone(torch.device("cpu")), "bench", steps) as progress:
            taken = {size: _measure_size(ranks, names, size, config, progress) for size in config.sizes}
        ranks.call("close")
        memory = _measure_memory(ranks, config.rounds)
    return [Measured(name, config.ranks, {size: taken[size][name] for size in config.sizes}) for name in names], memory


def _measure_size(
    ranks: WorkerGroup, names: Sequence[str], size: int, config: AllReduceConfig, progress: Progress
) -> dict[str, list[float]]:
    turns = {name: _turn(ranks, name, size // DTYPES[config.dtype].itemsize) for name in names}
    return interleave(turns, config.rounds, WARMUP, lambda _: progress.advance(1, size_name(size)))


def _turn(ranks: WorkerGroup, name: str, numel: int) -> Callable[[], float]:
    """A turn, of as many all-reduces as take at least TURN_S."""
    repetitions = 1
    # The shorter of two: one that was disturbed must not end the search.
    while repetitions * min(_slowest(ranks, "all_reduce", name, numel, repetitions) for _ in range(2)) < TURN_S:
        repetitions *= 2
    return functools.partial(_slowest, ranks, "all_reduce", name, numel, repetitions)


def _measure_memory(ranks: WorkerGroup, rounds: int) -> Memory:
    ranks.call("allocate")
    moved = 2 * MEMORY_BYTES * len(ranks.pids)  # read and written
    turns = {method: functools.partial(_slowest, ranks, method) for method in ("copy", "in_place")}
    seconds = interleave(turns, rounds, WARMUP)
    return Memory(**{method: [moved / taken for taken in seconds[method]] for method in turns})


def _slowest(ranks: WorkerGroup, method: str, *arguments: object) -> float:
    """Seconds of all ranks' work, done at once."""
    seconds: list[float] = ranks.call(method, *arguments)
    return max(seconds)


def report(config: AllReduceConfig, measured: list[Measured], memory: Memory) -> str:
    """Write the JSON and the figure, and say what they say."""
    bandwidths = {one.name: {size: one.bus_bandwidth(size) for size in config.sizes} for one in measured}
    # The same for every size.
    limit = bus_bandwidth(1, least_shared_memory_seconds(1, config.ranks, memory.bandwidth), config.ranks)
    write_json(
        config.output / "allreduce.json",
        {
            "machine": describe_machine(),
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
    return "\n".join([*lines, f"results in {config.output}: allreduce.json, allreduce.png"])


def size_name(size: int) -> str:
    """``4 B``, ``64 KiB``, ``25 MiB``."""
    for unit, name in ((MI, "MiB"), (KI, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def _table(config: AllReduceConfig, measured: list[Measured]) -> list[str]:
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


def _fits(measured: list[Measured]) -> list[str]:
    """For each algorithm its latency, its bandwidth, and how far its times are from such a line."""
    lines = ["time = alpha + bytes / bandwidth, fitted to the medians:"]
    for one in measured:
        fit = one.fit
        size, error = max(zip(one.seconds, fit.errors, strict=True), key=lambda pair: abs(math.log1p(pair[1])))
        lines.append(
            f"  {one.name}: alpha {1e6 * fit.alpha:.1f} us, {fit.bandwidth / 1e9:.2f} GB/s; off by "
            f"{100 * fit.mean_error:.0f} % on average, and most at {size_name(size)}, where it says "
            f"{1 + error:.2f} times what was measured"
        )
    return lines


def _comparisons(config: AllReduceConfig, measured: list[Measured]) -> list[str]:
    """Who is fastest at the smallest and at the largest size, and shared memory at the two that are quoted."""
    backend, *others = measured
    by_name = {one.name: one for one in measured}
    lines = []
    for size in (min(config.sizes), max(config.sizes)):
        best = min(others, key=lambda one: one.median(size))
        beaten = best.median(size) < backend.median(size)
        words = "the fastest is" if beaten else "nothing beats the backend; the nearest is"
        lines.append(f"{size_name(size)}: {words} {_against(best, backend, size)}")
    quoted = [size for size in QUOTED if size in config.sizes and SHARED in by_name]
    return lines + [f"{size_name(size)}: {_against(by_name[SHARED], backend, size)}" for size in quoted]


def _against(one: Measured, backend: Measured, size: int) -> str:
    return (
        f"{one.name}, with {1e6 * one.median(size):,.1f} us where the backend takes {1e6 * backend.median(size):,.1f}: "
        f"{one.speedup(size, backend):.2f} times as fast"
    )


def _memory(config: AllReduceConfig, measured: list[Measured], memory: Memory, limit: float) -> list[str]:
    copy, in_place = (Spread.of([1e-9 * value for value in values]) for values in (memory.copy, memory.in_place))
    words = (
        f"memory, all ranks at once, bytes read and written: copying {copy:.1f} GB/s, in place {in_place:.1f} GB/s. An "
        f"all-reduce in shared memory reads and writes each rank's tensor once, so where caches do not hold them, it moves at "
        f"most {1e-9 * limit:.1f} GB/s by bus bandwidth"
    )
    largest = max(config.sizes)
    uncached = [one for one in measured if one.name == SHARED and largest * config.ranks >= MEMORY_BYTES]
    share = "{}: {} reaches {:.0f} % of that"
    return [
        words,
        *(share.format(size_name(largest), SHARED, 100 * one.bus_bandwidth(largest) / limit) for one in uncached),
    ]
