"""The speedup of each parallel strategy, and the causes of what is missing (``python -m ddp.bench strategies``).

Trains the same model on the same global batches in every way that this machine allows, in turn, a few steps each: in a single
process, with data parallelism inside one process, and with DDP in 1, 2, ... N processes. Each strategy is a job of processes
that live through the benchmark, and each takes the step of ``ddp.train``.

A step of n processes should take 1/n of a single process's step. The excess is divided among its causes, which
ddp/bench/step_parts.py measures.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common.cli import option, parse
from common.cores import usable_cores
from common.data.datasets import ImageData
from common.distributed.process_group import DEVICES, DistEnv
from common.distributed.rank_logging import Progress
from common.distributed.worker_group import WorkerGroup
from common.errors import UsageError
from common.files.run_directory import files_line
from common.gpu.devices import count_gpus, why_no_gpu
from common.reporting.benchmark import CPU, run_alone, write_results
from common.reporting.benchmark_figures import plot_stacked
from common.reporting.timing import Spread, interleave, paired_ratio
from common.training.models import MODELS
from common.training.precision import PRECISIONS
from common.training.recipes import load_dataset
from ddp.bench.figures import plot_strategies
from ddp.bench.step_parts import PARTS, Runner, StepParts
from ddp.config import TrainConfig, require_samples

SINGLE = "single process"
WARMUP = 2
MOST_PROCESSES = 4  # the largest default of --processes


@dataclass(frozen=True)
class StrategiesConfig:
    """Settings of ``ddp.bench strategies``.

    :raises UsageError: for a global batch that does not divide, or more processes than GPUs
    """

    model: str = option("fashion-cnn", "the model that is trained, on glyphs", choices=MODELS)
    image_size: int = option(None, "as in ddp.train", minimum=8, maximum=1024)
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
    device: str = option("auto", "auto takes CUDA where there are several GPUs", choices=DEVICES)
    output: Path = option(Path("runs/bench-strategies"), "folder of the JSON and the figures")

    def __post_init__(self) -> None:
        gpus = 0 if self.device == "cpu" else count_gpus()
        if self.device == "auto":
            object.__setattr__(self, "device", "cuda" if gpus > 1 else "cpu")
        if self.device == "cuda" and gpus == 0:
            raise UsageError(f"--device cuda, but {why_no_gpu()}, or use --device cpu")
        if self.processes is None:
            most = gpus if self.device == "cuda" else max(2, usable_cores())
            object.__setattr__(self, "processes", tuple(range(1, min(most, MOST_PROCESSES) + 1)))
        object.__setattr__(self, "processes", tuple(sorted(self.processes)))
        if self.device == "cuda" and max(self.processes) > gpus:
            raise UsageError(
                f"--processes {max(self.processes)} is more than the {gpus} usable GPUs: give fewer, or --device cpu"
            )
        for count in self.processes:
            require_samples(self.model, self.batch_size, count)


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


def strategies(config: StrategiesConfig) -> list[Strategy]:
    """The strategies that this machine allows. The single process on one device comes first."""
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
class StrategyMeasurement:
    """The rounds of one strategy.

    :param seconds: seconds per step, one entry per round
    :param parts: the parts of a step, one entry per round, means over ranks and steps
    :param memory: peak MB of the largest process: resident on the CPU, allocated on a GPU
    """

    strategy: Strategy
    seconds: list[float]
    parts: list[StepParts]
    memory: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def part(self, name: str) -> float:
        """The median seconds per step of one of :data:`ddp.bench.step_parts.PARTS`."""
        values: list[float] = [getattr(parts, name) for parts in self.parts]
        return statistics.median(values)

    def speedup(self, single: StrategyMeasurement) -> Spread:
        """The speedup over the single process on one device, round by round."""
        return paired_ratio(single.seconds, self.seconds)


def main(argv: Sequence[str]) -> None:
    config = parse(StrategiesConfig, "ddp.bench strategies", __doc__, argv)
    run_alone("ddp.bench strategies", config.output, lambda: measure(config), lambda taken: report(config, taken))


def measure(config: StrategiesConfig) -> list[StrategyMeasurement]:
    """Start all jobs, let them take turns, and end them; once per build."""
    train_config = TrainConfig(
        model=config.model,
        image_size=config.image_size,
        batch_size=config.batch_size,
        precision=config.precision,
        epochs=10**6,  # the learning-rate schedule needs an end; the benchmark stops long before it
    )
    chosen, data = strategies(config), load_dataset(train_config)  # once, for all processes
    seconds: dict[str, list[float]] = {strategy.name: [] for strategy in chosen}
    parts: dict[str, list[StepParts]] = {strategy.name: [] for strategy in chosen}
    memory = dict.fromkeys(seconds, 0.0)
    total = config.builds * (config.rounds + WARMUP)
    with Progress(DistEnv.alone(CPU), "bench", total) as progress:
        for _ in range(config.builds):
            with contextlib.ExitStack() as stack:
                jobs = {s.name: stack.enter_context(_start(config, train_config, data, s)) for s in chosen}
                turns = {name: _StrategyTurn(ranks, config.steps) for name, ranks in jobs.items()}
                taken = interleave(turns, config.rounds, WARMUP, lambda done: progress.advance(1, f"round {done}"))
                for name, ranks in jobs.items():
                    seconds[name] += taken[name]
                    parts[name] += turns[name].parts[WARMUP:]
                    memory[name] = max(memory[name], *ranks.call("peak_memory"))
    return [StrategyMeasurement(s, seconds[s.name], parts[s.name], memory[s.name]) for s in chosen]


def _start(config: StrategiesConfig, train_config: TrainConfig, data: ImageData, strategy: Strategy) -> WorkerGroup:
    return WorkerGroup(
        strategy.processes,
        Runner,
        train_config,
        data,
        strategy.wrapper,
        strategy.devices,
        device=config.device,
        threads=strategy.threads,
        name=f"'{strategy.name}', rank",
    )


class _StrategyTurn:
    """A job's turn: some steps on all ranks at once.

    A call returns the seconds of one step, and appends its parts to ``parts``.
    """

    def __init__(self, ranks: WorkerGroup, steps: int) -> None:
        self._ranks, self._steps = ranks, steps
        self.parts: list[StepParts] = []

    def __call__(self) -> float:
        self.parts.append(StepParts.of(self._ranks.call("run", self._steps)))
        return self.parts[-1].total


def lost(measured: StrategyMeasurement, single: StrategyMeasurement) -> dict[str, float]:
    """The seconds that a step takes beyond the single process's step divided by the number of devices, by cause.

    The causes add up to the whole excess. A part that the single process has too counts only beyond its share.
    """
    devices = measured.strategy.devices
    beyond = {name: measured.part(name) - single.part(name) / devices for name in PARTS if name != "compute"}
    rest = measured.median - single.median / devices - sum(beyond.values())
    return {**beyond, "rest": rest}


def report(config: StrategiesConfig, measured: list[StrategyMeasurement]) -> str:
    """Write the JSON and the figures, and return the summary to print."""
    single = measured[0]
    write_results(
        config.output / "strategies.json",
        {"config": asdict(config), "strategies": [asdict(m) for m in measured]},
    )
    title = f"{config.model}, global batch {config.batch_size}, {config.precision}, {config.device}"
    plot_strategies(
        config.output / "strategies.png",
        {m.strategy.name: ([1e3 * s for s in m.seconds], m.memory) for m in measured},
        {m.strategy.name: (m.strategy.devices, m.speedup(single)) for m in measured},
        title,
    )
    _plot_lost(config.output / "lost.png", measured, title)
    files = files_line(config.output, ("strategies.json", "strategies.png", "lost.png"))
    return "\n".join([title, *_table(measured), "", *_reasons(measured), files])


def _plot_lost(path: Path, measured: list[StrategyMeasurement], title: str) -> None:
    """Draw each strategy's step as a stack: its share of the single process's step, and above it the excess by cause.

    A negative cause is subtracted from the share, so that the stack is as high as the step.
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


def _table(measured: list[StrategyMeasurement]) -> list[str]:
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


def _reasons(measured: list[StrategyMeasurement]) -> list[str]:
    """For each strategy with several devices, the causes of its excess, largest first."""
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
            if cause in ("communication", "imbalance") and seconds == 0:  # this strategy cannot have any
                continue
            words = WORDS[cause]
            if cause == "rest" and one.strategy.wrapper in ("torch", "handwritten") and causes["communication"] == 0:
                words += ", and copies between the GPUs"
            lines.append(f"  {100 * seconds / one.median:5.1f} %  {1e3 * seconds:6.2f} ms  {words}")
    return lines
