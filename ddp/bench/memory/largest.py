"""The largest model of each variant that trains within a limit of memory per rank: found by bisection, and really trained."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from common.distributed.process_group import DistEnv
from common.distributed.rank_logging import Progress
from common.distributed.worker_group import WorkerGroup, preload
from common.errors import UsageError
from common.reporting.benchmark import CPU
from common.reporting.benchmark_figures import plot_bars
from common.reporting.turns import write_report
from ddp.bench.memory.ledger import LATE_IMPORTS, LedgerWorker, MemoryConfig, formula
from ddp.bench.sharding import REPLICAS, STAGES, parameters_of


@dataclass(frozen=True)
class Largest:
    """The largest model that was trained within the limit.

    :param layers: its blocks; with one more, the model does not fit
    :param peak: of the rank that took most, bytes
    """

    layers: int
    parameters: int
    peak: int


def measure(config: MemoryConfig) -> dict[str, Largest]:
    """Search the largest model of each variant at the largest of ``--ranks``.

    :raises UsageError: when not even one block fits
    """
    preload(*LATE_IMPORTS)
    with Progress(DistEnv.alone(CPU), "bench", len(STAGES)) as progress:
        largest = {}
        for name, stage in STAGES.items():
            largest[name] = _search(config, name, stage)
            progress.advance(1, name)
    return largest


def _search(config: MemoryConfig, name: str, stage: int | None) -> Largest:
    ranks = max(map(int, config.ranks))
    parameters = [parameters_of(config.width, layers, config.length) for layers in (1, 2)]
    block_bytes = (parameters[1] - parameters[0]) * sum(formula(stage, ranks, config.precision).values())

    def peak(layers: int) -> int:
        with WorkerGroup(ranks, LedgerWorker, config, stage, threads=1) as group:
            return int(max(ledger.peak for ledger in group.call("run", layers)))

    fits, largest_peak = 1, peak(1)
    if largest_peak > config.limit_bytes:
        raise UsageError(
            f"--limit {config.limit} is too little for the smallest model, of one block: {name} needs "
            f"{math.ceil(largest_peak / 2**20)} MiB. Give more, or a smaller --width (64 at least)"
        )
    # What lies between two steps alone would fill the limit with so many blocks.
    too_many = max(2, math.ceil(config.limit_bytes / block_bytes) + 1)
    while too_many - fits > 1:
        layers = (fits + too_many) // 2
        own_peak = peak(layers)
        if own_peak <= config.limit_bytes:
            fits, largest_peak = layers, own_peak
        else:
            too_many = layers
    return Largest(fits, parameters_of(config.width, fits, config.length), largest_peak)


def report(config: MemoryConfig, largest: dict[str, Largest]) -> str:
    """Write the JSON and the figure, and return the summary to print."""
    ranks = max(map(int, config.ranks))
    results = {name: asdict(one) for name, one in largest.items()}
    title = f"the largest transformer of width {config.width} that trains within {config.limit} per rank, {ranks} ranks"
    plot_bars(
        config.output / "largest.png",
        {name: (one.parameters / 1e6,) * 3 for name, one in largest.items()},
        ceiling=config.limit_bytes * ranks / 16 / 1e6,
        ceiling_title="16 bytes per parameter on all ranks together",
        x_title="million parameters",
        title=title,
    )
    lines = [f"{title} ({config.precision})"]
    for name, one in largest.items():
        lines.append(
            f"  {name:<13}{one.layers:>5} blocks {one.parameters / 1e6:>8.1f} M parameters   "
            f"x {one.parameters / largest[REPLICAS].parameters:.2f}   "
            f"peak {one.peak / 2**20:.0f} MiB   {one.peak / one.parameters:.2f} bytes per parameter"
        )
    return write_report(config, "largest", {"ranks": ranks, "largest": results}, ["largest"], lines)
