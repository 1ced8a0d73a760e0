"""The cost of fault tolerance (``python -m ddp.bench safety``).

Five loops take turns, a chunk of steps each. Each loop has its own model:

- ``plain``: the step with the guard that does nothing: no flags, no check of the gradients, no saved statistics, no
  watchdog. ``plain again`` is the same loop a second time: the difference between the two is noise.
- ``guarded``: the step of ``ddp.train``, with flags attached to the loss and all-reduced, the check for inf and nan, and the
  watchdog. No checkpoint.
- ``saving in the background``: ``guarded`` with one checkpoint in each chunk; the chunk ends when it is on the disk.
- ``saving``: the same, but training waits for the disk.

Each guard is also timed by itself (ddp/bench/guard_costs.py), since all guards together cost less than two steps differ from
each other.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common.cli import option, parse
from common.data.datasets import ImageData
from common.distributed.process_group import BACKENDS, DEVICES, DistEnv, process_group
from common.distributed.rank_logging import Progress, rank_logging
from common.files.run_directory import files_line, prepare_output, results_in
from common.reporting.benchmark import write_results
from common.reporting.benchmark_figures import plot_ratios
from common.reporting.timing import Spread, interleave, paired_ratios
from common.training.metrics import MetricsWriter
from common.training.models import MODELS
from common.training.recipes import load_dataset
from ddp.bench.guard_costs import time_guards
from ddp.bench.step_loops import timed, trainer_step
from ddp.checkpoint.checkpointer import Checkpointer
from ddp.config import TrainConfig, require_samples
from ddp.job import Job, StepGuard
from ddp.train import build_job

LIMIT = 1.03
WARMUP = 1
PLAIN = ("plain", "plain again")
GUARDED, BACKGROUND, WAITING = "guarded", "saving in the background", "saving"
LOOPS = (*PLAIN, GUARDED, BACKGROUND, WAITING)
AGAINST = {"plain again": "plain", GUARDED: "plain", BACKGROUND: GUARDED, WAITING: GUARDED}


@dataclass(frozen=True)
class SafetyConfig:
    """Settings of ``ddp.bench safety``."""

    model: str = option("fashion-cnn", "the model whose step is timed", choices=MODELS)
    batch_size: int = option(144, "samples per step, over all ranks", minimum=1, maximum=12_000)
    builds: int = option(
        8,
        "times that all loops are rebuilt: memory placement alone can change a loop's time by a few percent",
        minimum=1,
    )
    rounds: int = option(3, "rounds per build that count", minimum=2)
    steps: int = option(50, "steps of each loop in a round; loops that save write one checkpoint in them", minimum=1)
    looks: int = option(300, "times that each guard is timed by itself", minimum=2)
    device: str = option("auto", "as in ddp.train", choices=DEVICES)
    backend: str = option("auto", "as in ddp.train", choices=BACKENDS)
    interface: str | None = option(None, "as in ddp.train", per_node=True)
    threads: int = option(0, "as in ddp.train", minimum=0)
    output: Path = option(
        Path("runs/bench-safety"),
        "folder of the JSON and the PNG; it holds the checkpoints while the benchmark runs",
        per_node=True,
    )


def main(argv: Sequence[str]) -> None:
    config = parse(SafetyConfig, "ddp.bench safety", __doc__, argv)
    with (
        process_group(config.device, config.backend, threads=config.threads, settings=config) as env,
        rank_logging(env),
    ):
        with env.fail_together():
            require_samples(config.model, config.batch_size, env.world_size)
            prepare_output(config.output)
        run = TrainConfig(
            model=config.model,
            batch_size=config.batch_size,
            run_dir=config.output / "checkpoints",
            epochs=10**6,  # the learning-rate schedule needs an end; the benchmark stops long before it
        )
        data = load_dataset(run)
        seconds = measure(config, run, data, env)
        guards = time_guards(build_job(run, env, data), config.looks)
        if env.is_main:
            with results_in(config.output):
                print(report(config, env, seconds, guards))


def measure(config: SafetyConfig, run: TrainConfig, data: ImageData, env: DistEnv) -> dict[str, list[float]]:
    """Measure the seconds per step of each loop, one entry per round."""
    seconds: dict[str, list[float]] = {}
    with (
        _folder(run.run_dir, env),
        MetricsWriter(run.run_dir, silent=not env.is_main) as metrics,
        Progress(env, "bench", config.builds * (config.rounds + WARMUP)) as progress,
    ):
        for build in range(config.builds):
            with contextlib.ExitStack() as watched:
                # Another order in each build: of two equal loops, the one that is built or run first can be 4 % faster.
                names = random.Random(build).sample(LOOPS, len(LOOPS))
                loops = {}
                for name in names:
                    if name in PLAIN:
                        job = build_job(run, env, data, guard=StepGuard())  # which does nothing
                        loops[name] = _steps(job, config.steps, trainer_step(job))
                        continue
                    job = build_job(run, env, data)
                    watched.enter_context(job.watchdog)
                    checkpointer = Checkpointer(replace(run, async_checkpoint=name == BACKGROUND), env, metrics)
                    saves = name in (BACKGROUND, WAITING)
                    loops[name] = _steps(job, config.steps, trainer_step(job), checkpointer if saves else None)
                taken = interleave(loops, config.rounds, WARMUP, lambda done: progress.advance(1, f"round {done}"))
            for name in LOOPS:
                seconds.setdefault(name, []).extend(taken[name])
    return seconds


@contextlib.contextmanager
def _folder(path: Path, env: DistEnv) -> Iterator[None]:
    """Create a folder, and delete it at the end of the block."""
    with env.fail_together():
        path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if env.is_main:
            shutil.rmtree(path, ignore_errors=True)


def report(config: SafetyConfig, env: DistEnv, seconds: dict[str, list[float]], guards: dict[str, list[float]]) -> str:
    """Write the JSON and the PNG, and return the summary to print."""
    ratios = {f"{name} / {other}": paired_ratios(seconds[name], seconds[other]) for name, other in AGAINST.items()}
    settings = {"world_size": env.world_size, "steps_per_checkpoint": config.steps}
    measured = {"seconds_per_step": seconds, "ratios": ratios, "seconds_of_guards": guards}
    write_results(config.output / "safety.json", {**settings, **measured})
    title = (
        f"{config.model}, {env.world_size} rank(s), batch {config.batch_size}, a checkpoint per {config.steps} steps"
    )
    plot_ratios(
        config.output / "safety.png", {"": ratios}, title=title, x_title="ratio of the times per step", limit=LIMIT
    )
    lines = [f"{title}; {config.builds} x {config.rounds} rounds, median [quartiles]"]
    lines += [f"{name:>24}: {Spread.of([1000 * s for s in taken]):.2f} ms per step" for name, taken in seconds.items()]
    for (name, other), values in zip(AGAINST.items(), ratios.values(), strict=True):
        lines.append(f"{name:>24} / {other}: {Spread.of(values):.3f}")
    together = [sum(each) for each in zip(*guards.values(), strict=True)]
    share = statistics.median(together) / statistics.median(seconds["plain"])
    lines += [f"{name:>26}: {Spread.of([1e3 * s for s in taken]):.3f} ms" for name, taken in guards.items()]
    lines += [
        f"all guards by themselves: {1e3 * statistics.median(together):.3f} ms, {100 * share:.2f} % of a plain step"
    ]
    return "\n".join([*lines, files_line(config.output, ("safety.json", "safety.png"))])


def _steps(
    job: Job, steps: int, step: Callable[[], None], checkpointer: Checkpointer | None = None
) -> Callable[[], float]:
    """Time some steps. With a checkpointer, the first step saves, and the time includes the end of the write."""

    def run() -> None:
        for number in range(steps):
            step()
            if checkpointer is not None and number == 0:
                checkpointer.save(job)
        if checkpointer is not None:
            checkpointer.finish()

    return timed(job.env, steps, run)
