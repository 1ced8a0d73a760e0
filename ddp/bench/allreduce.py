"""The time of an all-reduce, by algorithm and size (``python -m ddp.bench allreduce``).

Every algorithm of ddp/all_reduce/choice.py and the backend's own sum the same tensors in the same processes, from 4 B to 100 MiB.
(On one host, the hierarchical one is shared memory, so it is left out.) For each size the algorithms take turns. A turn is a
barrier followed by consecutive all-reduces for at least 20 ms; its time is that of the slowest rank, divided by the number of
all-reduces.

Where each of two ranks or more gets a GPU, NCCL is measured alone: the algorithms by hand sum tensors of the CPU. ``--device
cuda`` with more ranks than GPUs lets ranks share a GPU, over gloo, which copies each tensor to the host and back.

A line, alpha + beta * bytes, is fitted to each algorithm's medians (alpha_beta.py). The bandwidth of the memory is
measured in the same processes: it bounds an all-reduce between processes that share memory, of tensors of the CPU.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.benchmarking.timing import interleave
from common.benchmarking.turns import (
    WARMUP,
    Rounds,
    calls_of_a_turn,
    cells,
    ratios,
    table,
    timed_steps,
    write_report,
)
from common.command_line.cli import option
from common.distributed.dist_env import DistEnv
from common.errors import UsageError
from common.reporting.run_figures import COLORS, label_ends, new_figure
from ddp.all_reduce import ALL_REDUCES
from ddp.all_reduce.choice import build_all_reduce
from ddp.bench.alpha_beta import AlphaBeta, bus_bandwidth, shared_memory_limit
from ddp.bench.placement import PlacedConfig
from ddp.rendezvous.worker_group import WorkerGroup

KI, MI = 1 << 10, 1 << 20
SIZES = (4, 64, KI, 4 * KI, 16 * KI, 64 * KI, 256 * KI, MI, 4 * MI, 16 * MI, 25 * MI, 100 * MI)
ELEMENT = 4  # bytes, of a float32
BACKEND = "backend"
BY_HAND = tuple(name for name in ALL_REDUCES if name not in (BACKEND, "hierarchical"))
TURN_S = 0.02  # least length of a turn
MEMORY_BYTES = 128 * MI  # of each rank's tensor: far larger than the caches

Times = Mapping[int, list[float]]  # seconds of one all-reduce, by bytes; one entry per round


@dataclass(frozen=True)
class Config(PlacedConfig):
    """Settings of ``ddp.bench allreduce``.

    :raises UsageError: for a size that is not a whole number of elements
    """

    LEAST_RANKS = 2

    ranks: int = option(
        None, "processes (default: one per GPU; on the CPU 2, each with one thread)", minimum=2, maximum=64
    )
    sizes: tuple[int, ...] = option(SIZES, "sizes of the float32 tensors in bytes", minimum=ELEMENT)
    rounds: int = option(15, "measured rounds; in each, every algorithm takes one turn", minimum=2)
    output: Path = option(Path("runs/bench-allreduce"), "folder of the JSON and the figure")

    def __post_init__(self) -> None:
        for size in self.sizes:
            if size % ELEMENT:
                raise UsageError(f"--sizes {size} is no multiple of the {ELEMENT} bytes of a float32")
        if len(self.sizes) < 2:
            raise UsageError(f"--sizes {self.sizes[0]}: give two or more, which a line needs")
        super().__post_init__()
        object.__setattr__(self, "sizes", tuple(sorted(self.sizes)))

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The backend's own first, then those by hand, which sum tensors of the CPU."""
        return (BACKEND, *BY_HAND) if self.device == "cpu" else (BACKEND,)


def size_name(size: int) -> str:
    """``4 B``, ``64 KiB``, ``25 MiB``."""
    for unit, name in ((MI, "MiB"), (KI, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


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


def measure(config: Config) -> tuple[Mapping[str, Times], float]:
    """Start the ranks, let the algorithms take turns, and end the ranks. The backend's own algorithm comes first.

    :returns: also the bytes per second that the host's memory reads and writes for all ranks together; 0 for tensors of GPUs
    """
    names = config.algorithms
    seconds: dict[str, dict[int, list[float]]] = {name: {} for name in names}
    memory = 0.0
    with (
        WorkerGroup(
            config.ranks,
            AllReduceWorker,
            names,
            max(config.sizes) // ELEMENT,
            device=config.device,
            backend=config.placement.backend,
            threads=1,
        ) as ranks,
        Rounds(len(config.sizes) * (config.rounds + WARMUP)) as progress,
    ):

        def slowest(name: str, size: int, repetitions: int) -> float:
            return float(max(ranks.call("all_reduce", name, size // ELEMENT, repetitions)))

        for size in config.sizes:
            runs = {name: functools.partial(slowest, name, size) for name in names}
            turns = {name: functools.partial(run, calls_of_a_turn(run, TURN_S)) for name, run in runs.items()}
            for name, own in interleave(turns, config.rounds, WARMUP, lambda: progress.advance(1, "")).items():
                seconds[name][size] = own
        if config.device == "cpu":
            in_place = map(max, zip(*ranks.call("read_and_write", config.rounds), strict=True))
            memory = 2 * MEMORY_BYTES * config.ranks / statistics.median(in_place)
    return seconds, memory


def report(config: Config, measured: tuple[Mapping[str, Times], float]) -> str:
    """Write the JSON and the figure, and return the summary to print."""
    seconds, memory = measured
    medians = {name: {size: statistics.median(own) for size, own in of.items()} for name, of in seconds.items()}
    fits = {name: AlphaBeta.fit(list(of), list(of.values())) for name, of in medians.items()}
    bandwidths = {
        name: {size: bus_bandwidth(size, median, config.ranks) for size, median in of.items()}
        for name, of in medians.items()
    }
    limit = shared_memory_limit(config.ranks, memory)
    title = f"all-reduce, {config.placement}, float32"
    _plot(config.output / "allreduce.png", seconds, fits, title)
    lines = [f"{title}; {config.rounds} rounds, median [quartiles]"]
    for size in config.sizes:
        of_size = {name: own[size] for name, own in seconds.items()}
        columns = {
            "µs": cells(of_size, ",.1f", 1e6),
            "of the backend's time": cells(ratios(of_size, BACKEND), ".3f"),
            "bus GB/s": {name: f"{1e-9 * own[size]:.3f}" for name, own in bandwidths.items()},
        }
        lines += [size_name(size), *table(columns, first=26)]
    columns = {
        "alpha, µs": {name: f"{1e6 * fit.alpha:.1f}" for name, fit in fits.items()},
        "bandwidth, GB/s": {name: f"{1e-9 * fit.bandwidth:.2f}" for name, fit in fits.items()},
        "off by, on average": {name: f"{100 * fit.mean_error:.0f} %" for name, fit in fits.items()},
    }
    lines += ["", "time = alpha + bytes / bandwidth, fitted to the medians:", *table(columns, first=26)]
    if memory:
        lines.append(
            f"memory, all ranks at once, bytes read and written: {1e-9 * memory:.1f} GB/s. An all-reduce in shared memory reads "
            f"and writes each rank's tensor once. For tensors larger than the caches its bus bandwidth is at most "
            f"{1e-9 * limit:.1f} GB/s"
        )
    content = {
        "placement": str(config.placement),
        "memory_bytes_per_s": memory or None,
        "algorithms": [
            {"name": name, "seconds": own, "fit": asdict(fits[name]), "bus_bandwidth": bandwidths[name]}
            for name, own in seconds.items()
        ],
    }
    return write_report(config, "allreduce", content, ["allreduce"], lines)


def _plot(path: Path, seconds: Mapping[str, Times], fits: Mapping[str, AlphaBeta], title: str) -> None:
    """Draw the time of each algorithm over the size of the tensor, with the fitted line."""
    figure, axes = new_figure(1, 1, 4.4, f"{title}: time, median and quartiles, and alpha + bytes / bandwidth, fitted")
    plot, ends = axes[0, 0], {}
    for number, (name, times) in enumerate(seconds.items()):
        color, sizes = (COLORS[5], *COLORS)[number], np.array(list(times))
        low, median, high = 1e6 * np.quantile(list(times.values()), (0.25, 0.5, 0.75), axis=1)
        style: dict[str, Any] = {"color": color, "marker": "os^DvP"[number], "markersize": 4, "linestyle": "none"}
        plot.errorbar(sizes, median, [median - low, high - median], capsize=3, **style)
        curve = np.geomspace(sizes[0], sizes[-1], 200)
        plot.plot(curve, 1e6 * (fits[name].alpha + fits[name].beta * curve), color=color, linewidth=1)
        ends[name] = sizes[-1], median[-1], color
    apart = [size for size, larger in zip(sizes, (*sizes[1:], math.inf), strict=True) if larger > 2.5 * size]
    plot.set(xscale="log", yscale="log", xlabel="size of the tensor", ylabel="µs per all-reduce")
    plot.set_xticks(apart, list(map(size_name, apart)))
    plot.minorticks_off()
    label_ends(plot, ends)
    figure.savefig(path)
