"""The speedup of each way to use more devices, and why two are not twice as fast (``python -m ddp.bench scaling``).

Trains the same model on the same global batches in every way that this machine allows, in turn, a few steps each: in a single
process, with data parallelism inside one process, and with DDP in 1, 2, ... W processes. Each way is a job of processes that
live through the benchmark, and each takes the step of ``ddp.train``.

A step of n processes should take 1/n of a single process's step. Two causes share the excess. The same n processes also
train without sending gradients. What they take beyond the ideal is *compute* that does not scale: half a batch takes more than
half the time, all processes share the memory, and each runs the whole optimizer. What DDP takes beyond them is
*synchronization*: the part of the all-reduce that backward does not hide, and the wait for the slower rank.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import nn

from common.benchmarking.figures import plot_stacked
from common.benchmarking.timing import NOISE, paired_ratio
from common.benchmarking.turns import Times, cells, progress_of, table, take_turns, timed_steps, write_report
from common.command_line.cli import option
from common.data.datasets import ImageData
from common.distributed import DEVICES
from common.distributed.dist_env import DistEnv
from common.errors import UsageError
from common.machine import usable_cores
from common.models.build import MODELS
from common.training.precision import PRECISIONS
from common.training.recipes import load_dataset
from dataparallel.parallel import HandwrittenDataParallel
from ddp.bench.overhead import trainer_step
from ddp.bench.placement import place_ranks
from ddp.bench.variants import HOOKS, NO_SUM
from ddp.config import TrainConfig, require_samples
from ddp.rendezvous.worker_group import WorkerGroup
from ddp.strategies import register_hook
from ddp.train import build_job

SINGLE = "single process"
COMPUTE, SYNCHRONIZATION = "compute that does not scale", "synchronization"
MOST_PROCESSES = 4  # the largest default of --processes


@dataclass(frozen=True)
class Config:
    """Settings of ``ddp.bench scaling``.

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
    rounds: int = option(6, "measured rounds per build; in each, every job takes one turn", minimum=2)
    steps: int = option(5, "steps of each job in a round", minimum=1)
    device: str = option("auto", "auto takes CUDA where there is a GPU for each process", choices=DEVICES)
    output: Path = option(Path("runs/bench-scaling"), "folder of the JSON and the figure")

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
class Way:
    """A way to train.

    :param wrapper: of :class:`TrainingWorker`
    :param devices: number of GPUs, or of shares of the cores
    :param processes: number of processes that share the devices
    :param threads: intra-op threads of each process
    """

    name: str
    wrapper: str
    devices: int
    processes: int
    threads: int

    @property
    def unsynchronized(self) -> Way:
        """The same processes, which send no gradients."""
        return Way(f"{self.name}, nothing sent", "ddp, nothing sent", self.devices, self.processes, self.threads)


def ways(config: Config) -> list[Way]:
    """The ways that this machine allows. The single process on one device comes first."""
    most = max(config.processes)
    share = max(1, usable_cores() // most)
    chosen = [Way(SINGLE, "none", 1, 1, share)]
    if most > 1:
        if config.device == "cpu":
            chosen.append(Way(f"{SINGLE}, {most * share} threads", "none", most, 1, most * share))
            chosen.append(Way(f"dataparallel, {most} CPU devices", "handwritten", most, 1, most * share))
        else:
            chosen.append(Way(f"nn.DataParallel, {most} GPUs", "torch", most, 1, share))
            chosen.append(Way(f"dataparallel by hand, {most} GPUs", "handwritten", most, 1, share))
    return chosen + [Way(f"DDP, {n} process{'es' * (n > 1)}", "ddp", n, n, share) for n in config.processes]


class TrainingWorker:
    """The service of one rank: the job of ``ddp.train``.

    :param wrapper: ``"none"`` for the plain module, ``"handwritten"`` or ``"torch"`` for data parallelism in one process,
        ``"ddp"``, or ``"ddp, nothing sent"``, whose hook sums no bucket
    :param devices: number of devices of data parallelism in one process
    """

    def __init__(self, env: DistEnv, config: TrainConfig, data: ImageData, wrapper: str, devices: int) -> None:
        self._device = env.device
        job = build_job(config, env, data)
        if wrapper == "ddp, nothing sent":
            register_hook(job.model, *HOOKS[NO_SUM]())
        elif wrapper != "ddp":
            job.model = job.model.module
        if wrapper == "torch":
            job.model = nn.DataParallel(job.model, list(range(devices)))
        elif wrapper == "handwritten":
            on_gpus = env.device.type == "cuda"
            job.model = HandwrittenDataParallel(job.model, [f"cuda:{i}" if on_gpus else "cpu" for i in range(devices)])
        self._model, self._step = job.model, trainer_step(job)

    def run(self, steps: int) -> float:
        """Seconds of a step. All ranks start together."""
        return timed_steps(self._step, steps, self._device)[0]


def measure(config: Config) -> dict[str, list[float]]:
    """Start all jobs, let them take turns, and end them; once per build.

    :returns: for each job the seconds of a step on its slowest rank, one entry per round
    """
    train_config = TrainConfig(
        model=config.model,
        batch_size=config.batch_size,
        precision=config.precision,
        epochs=10**6,  # the learning-rate schedule needs an end; the benchmark stops long before it
    )
    chosen = ways(config)
    jobs = {one.name: one for one in (*chosen, *(one.unsynchronized for one in chosen if one.processes > 1))}
    data = load_dataset(train_config)  # once, for all processes

    @contextlib.contextmanager
    def build(names: list[str]) -> Iterator[dict[str, Callable[[], float]]]:
        with contextlib.ExitStack() as stack:
            groups = {}
            for one in map(jobs.__getitem__, names):
                settings = train_config, data, one.wrapper, one.devices
                group = WorkerGroup(one.processes, TrainingWorker, *settings, device=config.device, threads=one.threads)
                groups[one.name] = stack.enter_context(group)

            def turn(name: str) -> float:
                slowest: float = max(groups[name].call("run", config.steps))
                return slowest

            yield {name: functools.partial(turn, name) for name in names}

    with progress_of(config, 1) as progress:
        return take_turns(config, jobs, build, progress, f"{len(jobs)} jobs")


def causes(way: Way, seconds: Times) -> dict[str, float]:
    """The seconds that a step takes beyond the single process's step divided by the number of devices, by cause.

    They add up to the whole excess. In one process, all of it is compute: on several devices, also the copies between them.
    """
    ideal = statistics.median(seconds[SINGLE]) / way.devices
    whole = statistics.median(seconds[way.name])
    computed = statistics.median(seconds[way.unsynchronized.name if way.processes > 1 else way.name])
    return {COMPUTE: computed - ideal, SYNCHRONIZATION: whole - computed}


def report(config: Config, seconds: Times) -> str:
    """Write the JSON and the figure, and return the summary to print."""
    chosen = ways(config)
    ideal = statistics.median(seconds[SINGLE])
    title = f"{config.model}, global batch {config.batch_size}, {config.precision}, {config.device}"
    speedups = {one.name: paired_ratio(seconds[SINGLE], seconds[one.name]) for one in chosen}
    lost = {one.name: causes(one, seconds) for one in chosen}
    # Each step as a stack of the ideal and the causes.
    excess = {cause: [lost[one.name][cause] * one.devices / ideal for one in chosen] for cause in lost[SINGLE]}
    plot_stacked(
        config.output / "lost.png",
        {"": {"ideal": [1.0] * len(chosen), **excess}},
        list(lost),
        x_title="time per step, in multiples of the ideal: a single process's step, divided by the devices",
        title=f"where the lost time goes: {title}",
        line=1.0,
    )
    alike = {name for name, speedup in speedups.items() if speedup.within_noise(NOISE)}
    columns = {
        "ms per step [quartiles]": cells(seconds, ".1f", 1e3),
        "times as fast as one": {name: "as fast" if name in alike else f"{one:.2f}" for name, one in speedups.items()},
        "efficiency": {
            one.name: f"{(1 if one.name in alike else speedups[one.name].median) / one.devices:.0%}" for one in chosen
        },
        **{f"{cause}, ms": {name: f"{1e3 * own[cause]:.1f}" for name, own in lost.items()} for cause in excess},
    }
    content = {"ways": list(map(asdict, chosen)), "seconds": seconds, "lost": lost}
    return write_report(config, "scaling", content, ["lost"], [title, *table(columns, 33)])
