"""The hand-written DDP against torch's: what is a training step's time? (``python -m ddp.bench engines``)

Every engine trains its own copy of the same model on the same batch, which lies ready: forward, backward with the gradients
averaged, optimizer step. All live in the same processes and take turns; a turn begins with a barrier, and its time is the
slowest rank's, per step. The time on a processor, of all threads of a rank, Python's and gloo's among them, does not say who
waits, but tells engines apart also where others use the machine. One candidate does not synchronize at all, which bounds
what any engine can reach.

malloc is told to keep what is freed. Otherwise it gives freed gradients back to the kernel, or does not, as their places in
memory happen to be; to get such memory again takes up to a third of a step, and is nothing that an engine could help.

The engines are compared on a convolutional net, a ResNet-18, a wide MLP whose gradients are heavy and a deep one whose
gradients are many and small; against that one of torch's two variants (gradients copied out of the buckets, or views into
them) that is faster there. Then, on one model, what the engines can be told:

- bucket size: MiB of a bucket, where the default is 1 for the first and 25 for all others.
- overlap: all-reduces that start as soon as a bucket is complete, or only when all are. Both engines do either by the same
  communication hook, in buckets of the default size, so that nothing else differs.
- hooks: gradients that travel in bf16, or by PowerSGD of rank 4. PowerSGD gets all gradients in one bucket: it starts a second
  all-reduce when the first is done, from whichever of gloo's threads has noticed; with several buckets under way, the ranks
  would start theirs in different orders, and wait for each other forever.
- all-reduce: how the hand-written engine sums a bucket over the ranks, by each algorithm of ddp/all_reduce/choice.py.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from common.cli import option, parse
from common.distributed.process_group import DistEnv, require_alone
from common.distributed.rank_logging import Progress, rank_logging
from common.distributed.worker_group import WorkerGroup
from common.reporting.benchmark_figures import plot_ratio_panels
from common.reporting.machine import describe_machine, usable_cores
from common.reporting.run_directory import prepare_output, results_in, write_json
from common.reporting.timing import Spread, interleave, paired_ratio
from common.training.optimization import build_optimizer
from ddp.bench.variants import (
    BY_HAND,
    CLASSES,
    ENGINES,
    IMAGE,
    NETWORKS,
    PLAIN,
    SHARED,
    VIEWS,
    Engine,
    build_network,
    variations,
)

WARMUP = 1  # rounds
SETTLING_STEPS = 3  # of each engine, before: buckets are regrouped after the first, PowerSGD begins with the third
SAMPLES = {name: 16 if name == "resnet18" else 72 for name in NETWORKS}  # of a rank in a step


@dataclass(frozen=True)
class EnginesConfig:
    """Settings of ``ddp.bench engines``."""

    models: tuple[str, ...] = option(NETWORKS, "on which the engines are compared", choices=NETWORKS)
    variations: bool = option(True, "compare also what the engines can be told")
    model: str = option("mlp", "on which that is done", choices=NETWORKS)
    ranks: int = option(2, "processes, each with one thread", minimum=2, maximum=64)
    keep_memory: bool = option(True, "let malloc keep what is freed; otherwise chance decides which engine pays for it")
    builds: int = option(
        2, "times that all engines are built anew: where their tensors lie can cost one some percent", minimum=1
    )
    rounds: int = option(6, "rounds per build that count; in each, all engines take their turn", minimum=2)
    turn: float = option(0.25, "seconds of an engine's turn, in whole steps", above=0)
    output: Path = option(Path("runs/bench-engines"), "folder of the JSON and the figures")


class Worker:
    """What a rank does: it has a copy of the model for every engine, with its optimizer, and one batch for all.

    The learning rate is 0: the weights stay, and with them what a step has to compute.
    """

    def __init__(self, env: DistEnv, model: str, engines: Mapping[str, Engine], keep_memory: bool) -> None:
        if keep_memory:
            _keep_freed_memory()
        generator = torch.Generator().manual_seed(env.rank)
        self._images = torch.randn(SAMPLES[model], *IMAGE, generator=generator)
        self._labels = torch.randint(CLASSES, (SAMPLES[model],), generator=generator)
        self._closing: list[Callable[[], None]] = []
        self._models: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
        for name, engine in engines.items():
            wrapped, close = engine.wrap(build_network(model))
            optimizer = build_optimizer("sgd", wrapped.parameters(), momentum=0.9, weight_decay=5e-4)
            self._models[name] = wrapped, optimizer
            self._closing.append(close)

    def run(self, name: str, steps: int) -> tuple[float, float]:
        """Seconds of a step, and of all this rank's threads on a processor in it: the means of some, from a common start."""
        model, optimizer = self._models[name]
        dist.barrier()
        began, processor_began = time.perf_counter(), time.process_time()
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(self._images), self._labels).backward()
            optimizer.step()
        return (time.perf_counter() - began) / steps, (time.process_time() - processor_began) / steps

    def close(self) -> None:
        self._models.clear()
        for close in self._closing:
            close()


def _keep_freed_memory() -> None:
    """Have malloc keep what is freed, for the next step, instead of giving it back to the kernel."""
    if platform.libc_ver()[0] == "glibc":  # see mallopt(3), and malloc.h for the numbers
        malloc_options = {-1: 2**31 - 1, -3: 32 << 20}  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD: the most that each takes
        for name, value in malloc_options.items():
            ctypes.CDLL(None).mallopt(name, value)


@dataclass(frozen=True)
class Measured:
    """Engines that took turns.

    :param title: the model, or the subject of the variations
    :param seconds: of a step of each engine, on the slowest rank; one entry per round
    :param processor_seconds: of a step, the mean over the ranks
    :param reference: the engine that the others are compared with
    """

    title: str
    seconds: Mapping[str, list[float]]
    processor_seconds: Mapping[str, list[float]]
    reference: str


def main(argv: Sequence[str]) -> None:
    config = parse(EnginesConfig, "ddp.bench engines", __doc__, argv)
    require_alone("ddp.bench engines")
    with rank_logging(DistEnv.alone(torch.device("cpu"))):
        prepare_output(config.output)
        compared, varied = measure(config)
        with results_in(config.output):
            print(report(config, compared, varied))


def measure(config: EnginesConfig) -> tuple[list[Measured], list[Measured]]:
    """The engines on each model, and what they can be told on one."""
    subjects = variations() if config.variations else {}
    total = (len(config.models) + len(subjects)) * config.builds * (config.rounds + WARMUP)
    compared, varied = [], []
    with Progress(DistEnv.alone(torch.device("cpu")), "bench", total) as progress:
        for model in config.models:
            taken = _take_turns(config, model, ENGINES, functools.partial(progress.advance, 1, model))
            reference = min((PLAIN, VIEWS), key=lambda name: statistics.median(taken[0][name]))
            compared.append(Measured(model, *taken, reference))
        for subject, engines in subjects.items():
            taken = _take_turns(config, config.model, engines, functools.partial(progress.advance, 1, subject))
            varied.append(Measured(subject, *taken, VIEWS))
    return compared, varied


def _take_turns(
    config: EnginesConfig, model: str, engines: Mapping[str, Engine], after_round: Callable[[], None]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """:returns: the seconds and the processor's seconds of :class:`Measured`"""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    processor_seconds: dict[str, list[float]] = {name: [] for name in engines}
    for build in range(config.builds):
        # What is built first lies elsewhere in memory than what is built last.
        order = list(engines)[:: -1 if build % 2 else 1]
        built = {name: engines[name] for name in order}
        with WorkerGroup(config.ranks, Worker, model, built, config.keep_memory, threads=1) as ranks:
            for name in order:
                ranks.call("run", name, SETTLING_STEPS)
            steps = max(1, round(config.turn / _Turn(ranks, order[0], SETTLING_STEPS)()))
            turns = {name: _Turn(ranks, name, steps) for name in order}
            taken = interleave(turns, config.rounds, WARMUP, lambda _: after_round())
            ranks.call("close")
        for name, turn in turns.items():
            seconds[name] += taken[name]
            processor_seconds[name] += turn.processor_seconds[WARMUP:]
    return seconds, processor_seconds


class _Turn:
    """An engine's turn: some steps, all ranks at once. Called, it gives the seconds of one on the slowest rank;
    ``processor_seconds`` keeps each turn's."""

    def __init__(self, ranks: WorkerGroup, name: str, steps: int) -> None:
        self._ranks, self._name, self._steps = ranks, name, steps
        self.processor_seconds: list[float] = []

    def __call__(self) -> float:
        taken: list[tuple[float, float]] = self._ranks.call("run", self._name, self._steps)
        self.processor_seconds.append(statistics.fmean(processor_seconds for _, processor_seconds in taken))
        return max(seconds for seconds, _ in taken)


def report(config: EnginesConfig, compared: list[Measured], varied: list[Measured]) -> str:
    """Write the JSON and the figures, and say what they say."""
    write_json(
        config.output / "engines.json",
        {
            "machine": describe_machine(),
            "config": asdict(config),
            "samples_per_rank": SAMPLES,
            "models": [asdict(one) for one in compared],
            "variations": [asdict(one) for one in varied],
        },
    )
    title = f"{config.ranks} ranks on {usable_cores()} cores, gloo; {config.builds} x {config.rounds} rounds"
    files = ["engines.json", "engines.png"]
    _plot(config.output / "engines.png", compared, f"DDP by hand against torch's: {title}", "the faster of torch's two")
    if varied:
        files.append("variations.png")
        _plot(config.output / "variations.png", varied, f"what engines can be told, {config.model}: {title}", VIEWS)
    lines = [f"{title}, median [quartiles]"]
    for one in compared:
        lines += [f"{_described(one.title)}, {SAMPLES[one.title]} samples per rank", *_table(one)]
    lines += ["", *(verdict(one, name) for one in compared for name in (BY_HAND, SHARED))]
    if varied:
        lines += ["", f"{config.model}, what the engines can be told:"]
    for one in varied:
        lines += [one.title, *_table(one)]
    return "\n".join([*lines, f"results in {config.output}: {', '.join(files)}"])


def _described(model: str) -> str:
    parameters = list(build_network(model).parameters())
    megabytes = sum(parameter.nbytes for parameter in parameters) / 1e6
    return f"{model}, {len(parameters)} parameters of {megabytes:.1f} MB together"


def _table(measured: Measured) -> list[str]:
    of_reference, width = f"of {measured.reference}'s", 31
    lines = [
        f"{'':<34}{'ms per step':>{width}}{of_reference:>{width}}{'ms of processor':>{width}}{of_reference:>{width}}"
    ]
    for name in measured.seconds:
        cells = []
        for times in (measured.seconds, measured.processor_seconds):
            milliseconds = Spread.of([1e3 * value for value in times[name]])
            cells += [f"{milliseconds:.2f}", f"{paired_ratio(times[name], times[measured.reference]):.3f}"]
        lines.append(f"  {name:<32}" + "".join(f"{cell:>{width}}" for cell in cells))
    return lines


def verdict(measured: Measured, name: str) -> str:
    """How an engine does against torch's, in a sentence; faster or slower only where the quartiles agree."""
    reference = measured.reference
    ratio = paired_ratio(measured.seconds[name], measured.seconds[reference])
    if ratio.high < 1:
        found = "faster"
    elif ratio.low > 1:
        found = "slower"
    else:
        found = "as fast, within the noise"
    return f"{measured.title}: {name} takes {ratio:.3f} of the time of {reference}: {found}"


def _plot(path: Path, measured: list[Measured], title: str, reference: str) -> None:
    panels = {
        one.title: {
            name: [value / other for value, other in zip(seconds, one.seconds[one.reference], strict=True)]
            for name, seconds in one.seconds.items()
        }
        for one in measured
    }
    plot_ratio_panels(path, panels, title=title, x_title=f"time per step, as a multiple of '{reference}'")
