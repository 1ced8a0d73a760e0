"""The largest model of each variant that trains within a limit of memory per rank: found by search, and really trained."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from common.distributed.process_group import DistEnv
from common.distributed.rank_logging import Progress
from common.distributed.worker_group import WorkerGroup, preload
from common.errors import UsageError
from common.files.run_directory import files_line
from common.reporting.benchmark import CPU, write_results
from common.reporting.benchmark_figures import plot_bars
from ddp.bench.memory.config import MemoryConfig, formula
from ddp.bench.memory.ledger import LATE_IMPORTS, LedgerWorker
from ddp.bench.sharding import REPLICAS, STAGES, parameters_of


@dataclass(frozen=True)
class Largest:
    """The largest model that was trained within the limit.

    :param layers: its blocks; with one more it took more, or more than that is what lies between two steps alone
    :param peak: of the rank that took most, bytes
    :param trials: models that were trained to find it
    """

    layers: int
    parameters: int
    peak: int
    trials: int


def search(config: MemoryConfig) -> dict[str, Largest]:
    """For each variant at the largest of ``--ranks``.

    :raises UsageError: when not even one block fits
    """
    preload(*LATE_IMPORTS)
    ranks = max(map(int, config.ranks))
    with Progress(DistEnv.alone(CPU), "bench", len(STAGES)) as progress:
        found = {}
        for name, stage in STAGES.items():
            found[name] = _search(config, name, stage, ranks)
            progress.advance(1, name)
    return found


def _search(config: MemoryConfig, name: str, stage: int | None, ranks: int) -> Largest:
    peaks: dict[int, int] = {}

    def fits(layers: int) -> bool:
        if layers not in peaks:
            with WorkerGroup(ranks, LedgerWorker, config, stage, threads=1) as group:
                peaks[layers] = max(ledger.peak for ledger in group.call("run", layers))
        return peaks[layers] <= config.limit_bytes

    def parameters(layers: int) -> int:
        return parameters_of(config.width, layers, config.length)

    block = parameters(2) - parameters(1)
    bytes_of_block = block * sum(formula(stage, ranks, config.precision).values())
    most = max(1, int(config.limit_bytes / bytes_of_block))  # what lies between two steps alone would fill the limit
    if not fits(1):
        raise UsageError(
            f"--limit {config.limit} is too little for the smallest model, of one block: {name} needs "
            f"{math.ceil(peaks[1] / 2**20)} MiB. Give more, or a smaller --width (64 at least)"
        )
    low, high = 1, most + 1  # the first fits, the second cannot
    while high - low > 1:
        # Memory grows by the block: the next to try lies on the line through what was measured, or in the middle.
        slopes = [(peaks[one] - peaks[low]) / (one - low) for one in peaks if one != low and peaks[one] != peaks[low]]
        step = int((config.limit_bytes - peaks[low]) / min(slopes, key=abs)) if slopes else (high - low) // 2
        middle = min(max(low + step, low + 1), high - 1)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Largest(low, parameters(low), peaks[low], len(peaks))


def report(config: MemoryConfig, found: dict[str, Largest]) -> str:
    """Write the JSON and the figure, and return the summary to print."""
    ranks = max(map(int, config.ranks))
    write_results(
        config.output / "largest.json",
        {"config": asdict(config), "ranks": ranks, "largest": {name: asdict(one) for name, one in found.items()}},
    )
    reference = found[REPLICAS].parameters
    title = f"the largest transformer of width {config.width} that trains within {config.limit} per rank, {ranks} ranks"
    plot_bars(
        config.output / "largest.png",
        {name: (one.parameters / 1e6,) * 3 for name, one in found.items()},
        ceiling=config.limit_bytes * ranks / 16 / 1e6,
        ceiling_title="16 bytes per parameter on all ranks together",
        x_title="million parameters",
        title=title,
    )
    lines = [f"{title} ({config.precision})"]
    for name, one in found.items():
        lines.append(
            f"  {name:<13}{one.layers:>5} blocks {one.parameters / 1e6:>8.1f} M parameters   x {one.parameters / reference:.2f}   "
            f"peak {one.peak / 2**20:.0f} MiB   {one.peak / one.parameters:.2f} bytes per parameter"
        )
    return "\n".join([*lines, files_line(config.output, ["largest.json", "largest.png"])])
