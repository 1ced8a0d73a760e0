"""The JSON, the figure and the summary of ``ddp.bench allreduce``."""

from __future__ import annotations

import math
from dataclasses import asdict

from common.files.run_directory import files_line
from common.reporting.benchmark import write_results
from common.reporting.timing import Spread
from ddp.bench.allreduce.alpha_beta import bus_bandwidth, least_shared_memory_seconds
from ddp.bench.allreduce.config import KI, MI, SHARED, AllReduceConfig, size_name
from ddp.bench.allreduce.measuring import MEMORY_BYTES, AllReduceMeasurement, MemoryBandwidth
from ddp.bench.figures import plot_all_reduce

QUOTED = (4 * KI, 25 * MI)  # a small tensor, and DDP's default bucket


def report(config: AllReduceConfig, measured: list[AllReduceMeasurement], memory: MemoryBandwidth | None) -> str:
    """Write the JSON and the figure, and return the summary to print."""
    bandwidths = {one.name: {size: one.bus_bandwidth(size) for size in config.sizes} for one in measured}
    limit = None
    if memory is not None:  # as a bus bandwidth, the limit does not depend on the size
        limit = bus_bandwidth(1, least_shared_memory_seconds(1, config.ranks, memory.bandwidth), config.ranks)
    write_results(
        config.output / "allreduce.json",
        {
            "config": asdict(config),
            "placement": str(config.placement),
            "memory_bytes_per_s": memory and asdict(memory),
            "bus_bandwidth_limit_of_memory": limit,
            "algorithms": [
                {**asdict(one), "fit": asdict(one.fit), "bus_bandwidth": bandwidths[one.name]} for one in measured
            ],
        },
    )
    title = f"all-reduce, {config.placement}, {config.dtype}"
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
    lines += [*_fits(measured), "", *_comparisons(config, measured)]
    if memory is not None and limit is not None:
        lines += _memory(config, measured, memory, limit)
    return "\n".join([*lines, files_line(config.output, ("allreduce.json", "allreduce.png"))])


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
    if not others:
        return []
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
