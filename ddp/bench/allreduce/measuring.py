"""The times of all algorithms on the ranks, taken in turns, the bandwidth of the memory, and the report."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from common.distributed.process_group import DistEnv
from common.distributed.rank_logging import Progress
from common.distributed.worker_group import WorkerGroup
from common.reporting.benchmark import CPU
from common.reporting.benchmark_figures import plot_all_reduce
from common.reporting.timing import interleave, paired_ratios
from common.reporting.turns import calls_of_a_turn, cells, table, timed_steps, write_report
from ddp.all_reduce.base import AllReduce
from ddp.all_reduce.choice import build_all_reduce
from ddp.bench.allreduce.alpha_beta import AlphaBeta, bus_bandwidth, least_shared_memory_seconds
from ddp.bench.allreduce.config import BACKEND, ELEMENT, MI, SHARED, AllReduceConfig, size_name

WARMUP = 1
TURN_S = 0.02  # least length of a turn
MEMORY_BYTES = 128 * MI  # of each rank's tensor: far larger than the caches


class AllReduceWorker:
    """The service of one rank: it holds every algorithm, and a tensor of the largest size for each.

    Algorithms that do not allocate memory of their own share one tensor. All tensors hold zeros: repeated sums cannot make
    them infinite or denormal, and denormal numbers would change the time.
    """

    def __init__(self, env: DistEnv, algorithms: Sequence[str], numel: int) -> None:
        self._device = env.device
        self._all_reduces = {name: build_all_reduce(name) for name in algorithms}
        plain = torch.zeros(numel, device=env.device)
        self._buffers = {
            name: plain if type(one).allocate is AllReduce.allocate else one.allocate(numel, plain.dtype, env.device)
            for name, one in self._all_reduces.items()
        }

    def all_reduce(self, name: str, numel: int, repetitions: int) -> float:
        """Seconds of one all-reduce, the mean over ``repetitions``. All ranks start together."""
        run, buffer = self._all_reduces[name].run, self._buffers[name][:numel]
        return timed_steps(lambda: run(buffer), repetitions, self._device)[0]

    def read_and_write(self, rounds: int) -> list[float]:
        """Seconds to read MEMORY_BYTES and write them back in place, as an all-reduce does; one entry per round."""
        tensor = torch.zeros(MEMORY_BYTES // ELEMENT)
        return [timed_steps(lambda: tensor.mul_(1), 1)[0] for _ in range(WARMUP + rounds)][WARMUP:]


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
        """The line through the medians."""
        return AlphaBeta.fit(list(self.seconds), [self.median(size) for size in self.seconds])

    def median(self, size: int) -> float:
        """The median seconds."""
        return statistics.median(self.seconds[size])

    def bus_bandwidth(self, size: int) -> float:
        """Bytes per second, see :func:`ddp.bench.allreduce.alpha_beta.bus_bandwidth`."""
        return bus_bandwidth(size, self.median(size), self.ranks)


def measure(config: AllReduceConfig) -> tuple[list[AllReduceMeasurement], float | None]:
    """Start the ranks, let the algorithms take turns, and end the ranks. The backend's own algorithm comes first.

    :returns: also the bytes per second that the host's memory reads and writes for all ranks together, if the tensors are there
    """
    names = (BACKEND, *config.algorithms)
    arguments, backend = (names, max(config.sizes) // ELEMENT), config.placement.backend
    memory = None
    with (
        WorkerGroup(
            config.ranks, AllReduceWorker, *arguments, device=config.device, backend=backend, threads=1
        ) as ranks,
        Progress(DistEnv.alone(CPU), "bench", len(config.sizes) * (config.rounds + WARMUP)) as progress,
    ):
        seconds = {}
        for size in config.sizes:
            runs = {name: functools.partial(_run, ranks, name, size // ELEMENT) for name in names}
            turns = {name: functools.partial(run, calls_of_a_turn(run, TURN_S)) for name, run in runs.items()}
            after_round = functools.partial(_advance, progress, size_name(size))
            seconds[size] = interleave(turns, config.rounds, WARMUP, after_round)
        if config.device == "cpu":
            slowest = map(max, zip(*ranks.call("read_and_write", config.rounds), strict=True))
            memory = 2 * MEMORY_BYTES * config.ranks / statistics.median(slowest)
    return [
        AllReduceMeasurement(name, config.ranks, {size: seconds[size][name] for size in config.sizes}) for name in names
    ], memory


def _advance(progress: Progress, facts: str, _: int) -> None:
    progress.advance(1, facts)


def _run(ranks: WorkerGroup, name: str, numel: int, repetitions: int) -> float:
    """The seconds of one of these all-reduces on the slowest rank."""
    seconds: list[float] = ranks.call("all_reduce", name, numel, repetitions)
    return max(seconds)


def report(config: AllReduceConfig, results: tuple[list[AllReduceMeasurement], float | None]) -> str:
    """Write the JSON and the figure, and return the summary to print."""
    measured, memory = results
    bandwidths = {one.name: {size: one.bus_bandwidth(size) for size in config.sizes} for one in measured}
    limit = None
    if memory is not None:  # as a bus bandwidth, the limit does not depend on the size
        limit = bus_bandwidth(1, least_shared_memory_seconds(1, config.ranks, memory), config.ranks)
    title = f"all-reduce, {config.placement}, float32"
    plot_all_reduce(
        config.output / "allreduce.png",
        {one.name: one.seconds for one in measured},
        {one.name: (one.fit.alpha, one.fit.beta) for one in measured},
        bandwidths,
        limit,
        {size: size_name(size) for size in config.sizes},
        title,
    )
    lines = [f"{title}; {config.rounds} rounds, median [quartiles]"]
    for size in config.sizes:
        seconds = {one.name: one.seconds[size] for one in measured}
        speedups = {name: paired_ratios(measured[0].seconds[size], own) for name, own in seconds.items()}
        columns = {
            "us": cells(seconds, ",.1f", 1e6),
            "times as fast as backend": cells(speedups, ".2f"),
            "bus GB/s": {name: f"{1e-9 * of_sizes[size]:.3f}" for name, of_sizes in bandwidths.items()},
        }
        lines += [size_name(size), *table(columns, first=26)]
    lines += ["", "time = alpha + bytes / bandwidth, fitted to the medians:"]
    for one in measured:
        fit = one.fit
        size, error = max(zip(one.seconds, fit.errors, strict=True), key=lambda pair: abs(math.log1p(pair[1])))
        lines.append(
            f"  {one.name}: alpha {1e6 * fit.alpha:.1f} us, {fit.bandwidth / 1e9:.2f} GB/s; off by "
            f"{100 * fit.mean_error:.0f} % on average, and most at {size_name(size)}, where the line is "
            f"{1 + error:.2f} times the measured time"
        )
    if memory is not None and limit is not None:
        lines.append(
            f"memory, all ranks at once, bytes read and written: {1e-9 * memory:.1f} GB/s. An all-reduce in shared memory reads "
            f"and writes each rank's tensor once. For tensors larger than the caches its bus bandwidth is at most "
            f"{1e-9 * limit:.1f} GB/s"
        )
        largest = max(config.sizes)
        if SHARED in bandwidths and largest * config.ranks >= MEMORY_BYTES:
            share = 100 * bandwidths[SHARED][largest] / limit
            lines.append(f"{size_name(largest)}: {SHARED} reaches {share:.0f} % of this limit")
    content = {
        "placement": str(config.placement),
        "memory_bytes_per_s": memory,
        "bus_bandwidth_limit_of_memory": limit,
        "algorithms": [
            asdict(one) | {"fit": asdict(one.fit), "bus_bandwidth": bandwidths[one.name]} for one in measured
        ],
    }
    return write_report(config, "allreduce", content, ["allreduce"], lines)
