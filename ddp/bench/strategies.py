"""Why is two not twice as fast? (``python -m ddp.bench strategies``)

Trains the same model on the same global batches in every way there is on this machine, in turn, a few steps each: in a single
process, with data parallelism inside one process, and with DDP in 1, 2, ... N processes. Each candidate is a job of processes
that stay, and each takes ``ddp.train``'s own step.

A step of n processes should take an n-th of a single process's. What it takes longer is divided among its causes; see
ddp/bench/step_parts.py for how they are told apart.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from common.cli import option, parse
from common.distributed.process_group import DEVICES, DistEnv, require_alone
from common.distributed.rank_logging import Progress, rank_logging
from common.distributed.worker_group import WorkerGroup
from common.errors import UsageError
from common.reporting.benchmark_figures import plot_stacked, plot_strategies
from common.reporting.machine import describe_machine, usable_cores
from common.reporting.run_directory import prepare_output, results_in, write_json
from common.reporting.timing import Spread, interleave, paired_ratio
from common.training.models import MODELS
from common.training.precision import PRECISIONS
from ddp.bench.step_parts import PARTS, Runner, StepParts
from ddp.config import TrainConfig, micro_batch_size

SINGLE = "single process"
WARMUP = 2
MOST_PROCESSES = 4  # of those that are started unless --processes says otherwise


@dataclass(frozen=True)
class StrategiesConfig:
    """Settings of ``ddp.bench strategies``.

    :raises UsageError: for a global batch that does not divide, or more processes than GPUs
    """

    model: str = option("fashion-cnn", "the model that is trained, on glyphs", choices=MODELS)
    batch_size: int = option(144, "samples per step, over all processes", minimum=1, maximum=12_000)
    processes: tuple[int, ...] = option(
        None, "of DDP, as 1,2,4 (default: 1, 2, ... to the GPUs or usable cores, at most 4)", minimum=1, maximum=64
    )
    precision: str = option("fp32", "as in ddp.train", choices=PRECISIONS)
    builds: int = option(
        3, "times that all jobs are started anew: where their tensors lie can cost one a good part", minimum=1
    )
    rounds: int = option(6, "rounds per build that count; in each, all candidates take their turn", minimum=2)
    steps: int = option(5, "steps of each candidate in a round", minimum=1)
    device: str = option("auto", "auto takes CUDA where there are several GPUs", choices=DEVICES)
    output: Path = option(Path("runs/bench-strategies"), "folder of the JSON and the figures")

    def __post_init__(self) -> None:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if self.device == "auto":
            object.__setattr__(self, "device", "cuda" if gpus > 1 else "cpu")
        if self.device == "cuda" and gpus == 0:
            raise UsageError("--device cuda, but no CUDA device is usable here: use --device cpu, or check nvidia-smi")
        if self.processes is None:
            most = gpus if self.device == "cuda" else max(2, usable_cores())
            object.__setattr__(self, "processes", tuple(range(1, min(most, MOST_PROCESSES) + 1)))
        object.__setattr__(self, "processes", tuple(sorted(self.processes)))
        if self.device == "cuda" and max(self.processes) > gpus:
            raise UsageError(
                f"--processes {max(self.processes)} is more than the {gpus} usable GPUs: give fewer, or --device cpu"
            )
        for count in self.processes:
            micro_batch_size(self.batch_size, count, 1)


@dataclass(frozen=True)
class Strategy:
    """One candidate.

    :param devices: GPUs, or shares of the cores, that it has; :param wrapper: of :class:`ddp.bench.step_parts.Runner`
    :param processes: among which they are divided; :param threads: intra-op threads of each process
    """

    name: str
    wrapper: str
    devices: int
    processes: int
    threads: int


def strategies(config: StrategiesConfig) -> list[Strategy]:
    """What there is to compare on this machine; the single process on one device comes first."""
    most = max(config.processes)
    share = max(1, usable_cores() // most)
    found = [Strategy(SINGLE, "none", 1, 1, share)]
    if most > 1:
        if config.device == "cpu":
            found.append(Strategy(f"{SINGLE}, {most * share} threads", "none", most, 1, most * share))
            found.append(Strategy(f"dataparallel, {most} CPU devices", "handwritten", most, 1, most * share))
        else:
            found.append(Strategy(f"nn.DataParallel, {most} GPUs", "torch", most, 1, share))
            found.append(Strategy(f"dataparallel by hand, {most} GPUs", "handwritten", most, 1, share))
    ranks = [Strategy(f"DDP, {n} process{'es' * (n > 1)}", "ddp", n, n, share) for n in config.processes]
    return found + ranks


@dataclass(frozen=True)
class Measured:
    """A strategy's rounds.

    :param seconds: per step, one entry per round; :param parts: of a step, one entry per round, means over ranks and steps
    :param memory: the largest process's peak in MB: resident on the CPU, allocated on a GPU
    """

    strategy: Strategy
    seconds: list[float]
    parts: list[StepParts]
    memory: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def part(self, name: str) -> float:
        """Seconds per step, of :data:`ddp.bench.step_parts.PARTS`."""
        values: list[float] = [getattr(parts, name) for parts in self.parts]
        return statistics.median(values)

    def speedup(self, single: Measured) -> Spread:
        """Over the single process on one device, round by round."""
        return paired_ratio(single.seconds, self.seconds)


def main(argv: Sequence[str]) -> None:
    config = parse(StrategiesConfig, "ddp.bench strategies", __doc__, argv)
    require_alone("ddp.bench strategies")
    with rank_logging(DistEnv.alone(torch.device("cpu"))):
        prepare_output(config.output)
        measured = measure(config)
        with results_in(config.output):
            print(report(config, measured))


def measure(config: StrategiesConfig) -> list[Measured]:
    """Start all jobs, let them take turns, and end them."""
    train_config = TrainConfig(
        model=config.model,
        batch_size=config.batch_size,
        precision=config.precision,
        epochs=10**6,  # the schedule needs an end; this run is stopped long before it
    )
    chosen = strategies(config)
    seconds: dict[str, list[float]] = {strategy.name: [] for strategy in chosen}
    parts: dict[str, list[StepParts]] = {strategy.name: [] for strategy in chosen}
    memory = dict.fromkeys(seconds, 0.0)
    total = config.builds * (config.rounds + WARMUP)
    with Progress(DistEnv.alone(torch.device("cpu")), "bench", total) as progress:
        for _ in range(config.builds):
            with contextlib.ExitStack() as stack:
                jobs = {s.name: stack.enter_context(_start(config, train_config, s)) for s in chosen}
                candidates = {name: _Turn(ranks, config.steps) for name, ranks in jobs.items()}
                taken = interleave(candidates, config.rounds, WARMUP, lambda done: progress.advance(1, f"round {done}"))
                for name, ranks in jobs.items():
                    seconds[name] += taken[name]
                    parts[name] += candidates[name].parts[WARMUP:]
                    memory[name] = max(memory[name], *ranks.call("peak_memory"))
    return [Measured(s, seconds[s.name], parts[s.name], memory[s.name]) for s in chosen]


def _start(config: StrategiesConfig, train_config: TrainConfig, strategy: Strategy) -> WorkerGroup:
    return WorkerGroup(
        strategy.processes,
        Runner,
        train_config,
        strategy.wrapper,
        strategy.devices,
        device=config.device,
        threads=strategy.threads,
        name=f"'{strategy.name}', rank",
    )


class _Turn:
    """A job's turn: some steps, all ranks at once. Called, it gives the seconds of one; ``parts`` keeps each turn's."""

    def __init__(self, ranks: WorkerGroup, steps: int) -> None:
        self._ranks, self._steps = ranks, steps
        self.parts: list[StepParts] = []

    def __call__(self) -> float:
        self.parts.append(StepParts.of(self._ranks.call("run", self._steps)))
        return self.parts[-1].total


def lost(measured: Measured, single: Measured) -> dict[str, float]:
    """What a step takes beyond its share of the single process's, in seconds, by cause; they add up to all of it.

    What the single process spends too counts only as far as it was not divided by the number of devices.
    """
    devices = measured.strategy.devices
    beyond = {name: measured.part(name) - single.part(name) / devices for name in PARTS if name != "compute"}
    rest = measured.median - single.median / devices - sum(beyond.values())
    return {**beyond, "rest": rest}


def report(config: StrategiesConfig, measured: list[Measured]) -> str:
    """Write the JSON and the figures, and say what they say."""
    single = measured[0]
    write_json(
        config.output / "strategies.json",
        {"machine": describe_machine(), "config": asdict(config), "strategies": [asdict(m) for m in measured]},
    )
    title = f"{config.model}, global batch {config.batch_size}, {config.precision}, {config.device}"
    plot_strategies(
        config.output / "strategies.png",
        {m.strategy.name: ([1e3 * s for s in m.seconds], m.memory) for m in measured},
        {m.strategy.name: (m.strategy.devices, m.speedup(single)) for m in measured},
        title,
    )
    _plot_lost(config.output / "lost.png", measured, title)
    names = "strategies.json, strategies.png, lost.png"
    return "\n".join([title, *_table(measured), "", *_reasons(measured), f"results in {config.output}: {names}"])


def _plot_lost(path: Path, measured: list[Measured], title: str) -> None:
    """Each strategy's step as a stack: its share of the single process's step, and what came on top.

    What a strategy gained by some cause is taken from its share, so that the stack is as high as its step.
    """
    single = measured[0]
    stacks: dict[str, list[float]] = {name: [] for name in ("a single process's step, divided", *WORDS.values())}
    for one in measured:
        ideal, causes = single.median / one.strategy.devices, lost(one, single)
        gained = sum(min(0.0, seconds) for seconds in causes.values())
        stacks["a single process's step, divided"].append(1.0 + gained / ideal)
        for cause, words in WORDS.items():
            stacks[words].append(max(0.0, causes[cause]) / ideal)
    plot_stacked(
        path,
        {"": stacks},
        [one.strategy.name.replace(", ", ",\n") for one in measured],
        x_title="",
        y_title="time per step, in multiples of the ideal",
        title=f"where the lost time goes: {title}",
        line=(1.0, "ideal"),
    )


WORDS = {
    "input": "input",
    "communication": "communication exposed",
    "imbalance": "imbalance between ranks",
    "update": "optimizer, on every device",
    "rest": "the rest: compute that does not scale",
}


def _table(measured: list[Measured]) -> list[str]:
    single = measured[0]
    lines = [
        f"{'':<34}{'ms per step [quartiles]':>26}{'speedup':>24}{'efficiency':>12}{'peak MB per process':>21}",
    ]
    for one in measured:
        speedup = one.speedup(single)
        efficiency = f"{100 * speedup.median / one.strategy.devices:.0f} %"
        milliseconds = Spread.of([1e3 * seconds for seconds in one.seconds])
        lines.append(
            f"{one.strategy.name:<34}{f'{milliseconds:.1f}':>26}{f'{speedup:.2f}':>24}{efficiency:>12}{one.memory:>21.0f}"
        )
    return lines


def _reasons(measured: list[Measured]) -> list[str]:
    """For each strategy with several devices, what it lost and to what."""
    single, lines = measured[0], []
    for one in measured:
        devices = one.strategy.devices
        if devices == 1:
            continue
        ideal, causes = single.median / devices, lost(one, single)
        speedup = one.speedup(single).median
        lines.append(
            f"{one.strategy.name}: {speedup:.2f} times as fast as one, not {devices}: a step takes {1e3 * one.median:.1f} ms "
            f"where {1e3 * ideal:.1f} would be 1/{devices} of one's. Of its time:"
        )
        for cause, seconds in sorted(causes.items(), key=lambda item: -item[1]):
            if cause in ("communication", "imbalance") and seconds == 0:  # there is none
                continue
            words = WORDS[cause]
            if cause == "rest" and one.strategy.wrapper in ("torch", "handwritten") and causes["communication"] == 0:
                words += ", and copies between the GPUs"
            lines.append(f"  {100 * seconds / one.median:5.1f} %  {1e3 * seconds:6.2f} ms  {words}")
    return lines
