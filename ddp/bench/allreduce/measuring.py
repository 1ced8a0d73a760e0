"""The times of all algorithms on the ranks, taken in turns, the bandwidth of the memory, and the report."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch

from common.distributed.process_group import DistEnv
from common.distributed.rank_logging import Progress
from common.distributed.worker_group import WorkerGroup
from common.reporting.timing import interleave
from common.reporting.turns import CPU, calls_of_a_turn, cells, ratios, table, timed_steps, write_report
from ddp.all_reduce.choice import build_all_reduce
from ddp.bench.allreduce.alpha_beta import AlphaBeta, bus_bandwidth, shared_memory_limit
from ddp.bench.allreduce.config import BACKEND, ELEMENT, MI, SHARED, AllReduceConfig, size_name
from ddp.bench.allreduce.figure import plot_all_reduce

WARMUP = 1
TURN_S = 0.02  # least length of a turn
MEMORY_BYTES = 128 * MI  # of each rank's tensor: far larger than the caches


class AllReduceWorker:
    """The service of one rank: it holds every algorithm, and a tensor of the largest size for each.

    All tensors hold zeros: repeated sums cannot make
    them infinite or denormal, and denormal numbers would change the time.
    """

    def __init__(self, env: DistEnv, algorithms: Sequence[str], numel: int) -> None:
        self._device = env.device
        self._all_reduces = {name: build_all_reduce(name) for name in algorithms}
        self._buffers = {
            name: one.allocate(numel, torch.float32, env.device) for name, one in self._all_reduces.items()
        }

    def all_reduce(self, name: str, numel: int, repetitions: int) -> float:
        """Seconds of one all-reduce, the mean over ``repetitions``. All ranks start together."""
        run, buffer = self._all_reduces[name].run, self._buffers[name][:numel]
        return timed_steps(lambda: run(buffer), repetitions, self._device)[0]

    def read_and_write(self, rounds: int) -> list[float]:
        """Seconds to read MEMORY_BYTES and write them back in place, as an all-reduce does; one entry per round."""
        tensor = torch.zeros(MEMORY_BYTES // ELEMENT)
        return [timed_steps(lambda: tensor.mul_(1), 1)[0] for _ in range(WARMUP + rounds)][WARMUP:]


Seconds = Mapping[str, Mapping[int, list[float]]]  # of one all-reduce, by algorithm and bytes; one entry per round


def measure(config: AllReduceConfig) -> tuple[Seconds, float | None]:
    """Start the ranks, let the algorithms take turns, and end the ranks. The backend's own algorithm comes first.

    :returns: also the bytes per second that the host's memory reads and writes for all ranks together, if the tensors are there
    """
    names = config.algorithms
    arguments, backend = (names, max(config.sizes) // ELEMENT), config.placement.backend
    seconds: dict[str, dict[int, list[float]]] = {name: {} for name in names}
    memory = None
    with (
        WorkerGroup(
            config.ranks, AllReduceWorker, *arguments, device=config.device, backend=backend, threads=1
        ) as ranks,
        Progress(DistEnv.alone(CPU), "bench", len(config.sizes) * (config.rounds + WARMUP)) as progress,
    ):

        def slowest(name: str, size: int, repetitions: int) -> float:
            return float(max(ranks.call("all_reduce", name, size // ELEMENT, repetitions)))

        for size in config.sizes:
            runs = {name: functools.partial(slowest, name, size) for name in names}
            turns = {name: functools.partial(run, calls_of_a_turn(run, TURN_S)) for name, run in runs.items()}
            for name, own in interleave(turns, config.rounds, WARMUP, lambda _: progress.advance(1, "")).items():
                seconds[name][size] = own
        if config.device == "cpu":
            in_place = map(max, zip(*ranks.call("read_and_write", config.rounds), strict=True))
            memory = 2 * MEMORY_BYTES * config.ranks / statistics.median(in_place)
    return seconds, memory


def report(config: AllReduceConfig, measured: tuple[Seconds, float | None]) -> str:
    """Write the JSON and the figure, and return the summary to print."""
    seconds, memory = measured
    medians = {name: {size: statistics.median(own) for size, own in of.items()} for name, of in seconds.items()}
    fits = {name: AlphaBeta.fit(list(of), list(of.values())) for name, of in medians.items()}
    bandwidths = {
        name: {size: bus_bandwidth(size, median, config.ranks) for size, median in of.items()}
        for name, of in medians.items()
    }
    limit = None if memory is None else shared_memory_limit(config.ranks, memory)
    title = f"all-reduce, {config.placement}, float32"
    plot_all_reduce(
        config.output / "allreduce.png",
        seconds,
        {name: (fit.alpha, fit.beta) for name, fit in fits.items()},
        bandwidths,
        limit,
        {size: size_name(size) for size in config.sizes},
        title,
    )
    lines = [f"{title}; {config.rounds} rounds, median [quartiles]"]
    for size in config.sizes:
        of_size = {name: own[size] for name, own in seconds.items()}
        columns = {
            "us": cells(of_size, ",.1f", 1e6),
            "of the backend's time": cells(ratios(of_size, BACKEND), ".3f"),
            "bus GB/s": {name: f"{1e-9 * own[size]:.3f}" for name, own in bandwidths.items()},
        }
        lines += [size_name(size), *table(columns, first=26)]
    columns = {
        "alpha, us": {name: f"{1e6 * fit.alpha:.1f}" for name, fit in fits.items()},
        "bandwidth, GB/s": {name: f"{1e-9 * fit.bandwidth:.2f}" for name, fit in fits.items()},
        "off by, on average": {name: f"{100 * fit.mean_error:.0f} %" for name, fit in fits.items()},
    }
    lines += ["", "time = alpha + bytes / bandwidth, fitted to the medians:", *table(columns, first=26)]
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
        "algorithms": [
            {"name": name, "seconds": own, "fit": asdict(fits[name]), "bus_bandwidth": bandwidths[name]}
            for name, own in seconds.items()
        ],
    }
    return write_report(config, "allreduce", content, ["allreduce"], lines)
