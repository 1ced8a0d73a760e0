"""The speedup of each parallel strategy, and the causes of what is missing (``python -m ddp.bench strategies``).

Trains the same model on the same global batches in every way that this machine allows, in turn, a few steps each: in a single
process, with data parallelism inside one process, and with DDP in 1, 2, ... N processes. Each strategy is a job of processes
that live through the benchmark, and each takes the step of ``ddp.train``.

A step of n processes should take 1/n of a single process's step. The excess is divided among its causes, which
ddp/bench/step_parts.py measures.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common.cli import option
from common.distributed.placement import place_ranks
from common.distributed.process_group import DEVICES
from common.distributed.worker_group import WorkerGroup
from common.errors import UsageError
from common.machine import usable_cores
from common.reporting.benchmark_figures import plot_stacked
from common.reporting.timing import NOISE, Spread, paired_ratio
from common.reporting.turns import cells, progress_of, table, take_turns, write_report
from common.training.models import MODELS
from common.training.precision import PRECISIONS
from common.training.recipes import load_dataset
from ddp.bench.step_parts import Runner, StepParts
from ddp.config import TrainConfig, require_samples

SINGLE, ONE = "single process", "DDP, 1 process"
MOST_PROCESSES = 4  # the largest default of --processes


@dataclass(frozen=True)
class Config:
    """Settings of ``ddp.bench strategies``.

    :raises UsageError: for a global batch that does not divide, or more processes than GPUs
    """

    model: str = option("fashion-cnn", "the model that is trained, on glyphs", choices=MODELS)
    batch_size: int = option(144, "samples per step, over all processes", minimum=1, maximum=12_000)
    processes: tuple[int, ...] = option(
        None,
        "numbers of DDP processes, as 1,2,4 (default: 1, 2, ... up to the GPUs or usable cores, at most 4)",
        minimum=1,
        maximum=64,
    )
    precision: str = option("fp32", "as in ddp.train", choices=PRECISIONS)
    builds: int = option(
        3, "times that all jobs are restarted: memory placement alone can slow one of them considerably", minimum=1
    )
    rounds: int = option(6, "measured rounds per build; in each, every strategy takes one turn", minimum=2)
    steps: int = option(5, "steps of each strategy in a round", minimum=1)
    device: str = option("auto", "auto takes CUDA where there is a GPU for each process", choices=DEVICES)
    output: Path = option(Path("runs/bench-strategies"), "folder of the JSON and the figure")

    def __post_init__(self) -> None:
        placement = place_ranks(self.device, max(self.processes or (2,)))
        most = min(placement.gpus or max(2, usable_cores()), MOST_PROCESSES)
        processes = sorted(self.processes or range(1, most + 1))
        if 0 < placement.gpus < processes[-1]:
            raise UsageError(
                f"--processes {processes[-1]} is more than the {placement.gpus} usable GPUs: give fewer, or --device cpu"
            )
        for count in processes:
            require_samples(self.model, self.batch_size, count)
        object.__setattr__(self, "device", placement.device)
        object.__setattr__(self, "processes", tuple(processes))


@dataclass(frozen=True)
class Strategy:
    """A way to train.

    :param wrapper: of :class:`ddp.bench.step_parts.Runner`
    :param devices: number of GPUs, or of shares of the cores
    :param processes: number of processes that share the devices
    :param threads: intra-op threads of each process
    """

    name: str
    wrapper: str
    devices: int
    processes: int
    threads: int


def strategies(config: Config) -> list[Strategy]:
    """The strategies that this machine allows. The single process on one device comes first."""
    most = max(config.processes)
    share = max(1, usable_cores() // most)
    chosen = [Strategy(SINGLE, "none", 1, 1, share)]
    if most > 1:
        if config.device == "cpu":
            chosen.append(Strategy(f"{SINGLE}, {most * share} threads", "none", most, 1, most * share))
            chosen.append(Strategy(f"dataparallel, {most} CPU devices", "handwritten", most, 1, most * share))
        else:
            chosen.append(Strategy(f"nn.DataParallel, {most} GPUs", "torch", most, 1, share))
            chosen.append(Strategy(f"dataparallel by hand, {most} GPUs", "handwritten", most, 1, share))
    ranks = [Strategy(f"DDP, {n} process{'es' * (n > 1)}", "ddp", n, n, share) for n in config.processes]
    return chosen + ranks


def measure(config: Config) -> dict[str, list[StepParts]]:
    """Start all jobs, let them take turns, and end them; once per build.

    :returns: for each strategy the parts of a step, one entry per round, means over ranks and steps
    """
    train_config = TrainConfig(
        model=config.model,
        batch_size=config.batch_size,
        precision=config.precision,
        epochs=10**6,  # the learning-rate schedule needs an end; the benchmark stops long before it
    )
    chosen = {strategy.name: strategy for strategy in strategies(config)}
    data = load_dataset(train_config)  # once, for all processes

    @contextlib.contextmanager
    def build(names: list[str]) -> Iterator[dict[str, Callable[[], StepParts]]]:
        with contextlib.ExitStack() as stack:
            jobs = {}
            for name in names:
                one = chosen[name]
                job = WorkerGroup(
                    one.processes,
                    Runner,
                    train_config,
                    data,
                    one.wrapper,
                    one.devices,
                    device=config.device,
                    threads=one.threads,
                )
                jobs[name] = stack.enter_context(job)

            def turn(name: str) -> StepParts:
                """Some steps on all ranks of a job at once."""
                return StepParts.of(jobs[name].call("run", config.steps))

            yield {name: functools.partial(turn, name) for name in names}

    with progress_of(config, 1) as progress:
        return take_turns(config, chosen, build, progress, f"{len(chosen)} strategies")


def lost(measured: Sequence[StepParts], single: Sequence[StepParts], devices: int) -> dict[str, float]:
    """The seconds that a step takes beyond the single process's step divided by the number of devices, by cause.

    The causes add up to the whole excess. A part that the single process has too counts only beyond its share.
    """
    own, alone = (map(statistics.median, zip(*steps, strict=True)) for steps in (measured, single))
    parts = zip(StepParts._fields, own, alone, strict=True)
    causes = {CAUSES[name]: seconds - of_single / devices for name, seconds, of_single in parts}
    whole = statistics.median(map(sum, measured)) - statistics.median(map(sum, single)) / devices
    causes[CAUSES["compute"]] += whole - sum(causes.values())  # medians of parts do not quite add up to the step's
    return causes


def as_fast(speedups: Mapping[str, Spread]) -> set[str]:
    """The strategies whose difference to the single process is noise.

    DDP in one process does all that the single one does, and more. As much as it seems faster, any strategy may.
    """
    noise = max(NOISE, speedups[ONE].median - 1 if ONE in speedups else 0.0)
    return {name for name, speedup in speedups.items() if speedup.within_noise(noise)}


CAUSES = {
    "input": "input",
    "communication": "communication exposed",
    "imbalance": "imbalance between ranks",
    "update": "optimizer, on every device",
    "compute": "compute that does not scale",  # on GPUs also the copies of data parallelism in one process
}


def report(config: Config, measured: Mapping[str, list[StepParts]]) -> str:
    """Write the JSON and the figure, and return the summary to print."""
    chosen = strategies(config)
    seconds = {name: [sum(parts) for parts in own] for name, own in measured.items()}
    ideal = statistics.median(seconds[SINGLE])
    rows = [
        {
            "strategy": asdict(one),
            "seconds": seconds[one.name],
            "parts": [parts._asdict() for parts in measured[one.name]],
        }
        for one in chosen
    ]
    title = f"{config.model}, global batch {config.batch_size}, {config.precision}, {config.device}"
    devices = {one.name: one.devices for one in chosen}
    speedups = {name: paired_ratio(seconds[SINGLE], own) for name, own in seconds.items()}
    causes = {name: lost(own, measured[SINGLE], devices[name]) for name, own in measured.items()}
    # Each step as a stack of the ideal and the causes.
    excess = {name: {cause: s * devices[name] / ideal for cause, s in own.items()} for name, own in causes.items()}
    plot_stacked(
        config.output / "lost.png",
        {
            "": {"ideal": [1.0] * len(excess)}
            | {cause: [own[cause] for own in excess.values()] for cause in CAUSES.values()}
        },
        list(causes),
        x_title="time per step, in multiples of the ideal: a single process's step, divided by the devices",
        title=f"where the lost time goes: {title}",
        line=1.0,
    )
    alike = as_fast(speedups)
    columns = {
        "ms per step [quartiles]": cells(seconds, ".1f", 1e3),
        "times as fast as one": {name: "as fast" if name in alike else f"{one:.2f}" for name, one in speedups.items()},
        "efficiency": {
            name: f"{(1 if name in alike else one.median) / devices[name]:.0%}" for name, one in speedups.items()
        },
    }
    content = {"strategies": rows, "lost": causes}
    return write_report(config, "strategies", content, ["lost"], [title, *table(columns, 28)])
