"""The cost of fault tolerance (``python -m ddp.bench safety``).

Five loops take turns, a chunk of steps each. Each loop has its own model:

- ``plain``: the step with the guard that does nothing: an empty report, no check of the gradients, no saved statistics, no
  watchdog. ``plain again`` is the same loop a second time: the difference between the two is noise.
- ``guarded``: the step of ``ddp.train``, with the report of each rank, the check for inf and nan, and the
  watchdog. No checkpoint.
- ``saving in the background``: ``guarded`` with one checkpoint in each chunk; the chunk ends when it is on the disk.
- ``saving``: the same, but training waits for the disk.
"""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from common.benchmarking.turns import Step
from common.command_line.cli import option, parse
from common.training.metrics import MetricsWriter
from ddp.bench.overhead import OverheadConfig, measure, report, trainer_step
from ddp.checkpoint.checkpointer import Checkpointer
from ddp.job import Job, StepGuard

PLAIN, AGAIN, GUARDED, BACKGROUND, WAITING = "plain", "plain again", "guarded", "saving in the background", "saving"
AGAINST = {AGAIN: PLAIN, GUARDED: PLAIN, BACKGROUND: GUARDED, WAITING: GUARDED}


@dataclass(frozen=True)
class SafetyConfig(OverheadConfig):
    """Settings of ``ddp.bench safety``."""

    builds: int = option(8, "times that all loops are rebuilt", minimum=1)
    rounds: int = option(3, "rounds per build that count", minimum=2)
    steps: int = option(50, "steps of each loop in a round; loops that save write one checkpoint in them", minimum=1)
    output: Path = option(
        Path("runs/bench-safety"),
        "folder of the JSON and the PNG; it holds the checkpoints while the benchmark runs",
        per_node=True,
    )


def main(argv: Sequence[str]) -> None:
    config = parse(SafetyConfig, "ddp.bench safety", __doc__, argv)
    run = config.training
    with config.start() as (env, job), ExitStack() as files:
        with env.fail_together():
            run.run_dir.mkdir(parents=True, exist_ok=True)
        if env.is_main:
            files.callback(shutil.rmtree, run.run_dir, ignore_errors=True)
        metrics = files.enter_context(MetricsWriter(run.run_dir, silent=not env.is_main))

        def plain(_: ExitStack) -> Step:
            own = job()
            own.guard = StepGuard()
            return trainer_step(own)

        def guarded(stack: ExitStack) -> Job:
            own = job()
            stack.enter_context(own.watchdog)
            return own

        def saving(in_background: bool, stack: ExitStack) -> Step:
            checkpointer = Checkpointer(replace(run, async_checkpoint=in_background), env, metrics)
            return saving_step(guarded(stack), checkpointer, config.steps)

        loops: dict[str, Callable[[ExitStack], Step]] = {
            PLAIN: plain,
            AGAIN: plain,
            GUARDED: lambda stack: trainer_step(guarded(stack)),
            BACKGROUND: functools.partial(saving, True),
            WAITING: functools.partial(saving, False),
        }
        seconds = measure(config, env, loops)
        report(config, env, "safety", seconds, AGAINST, {"steps_per_checkpoint": config.steps})


def saving_step(job: Job, checkpointer: Checkpointer, steps: int) -> Step:
    """The trainer's step. The first of each ``steps`` saves, and the last waits until that is written."""
    step, numbers = trainer_step(job), itertools.cycle(range(steps))

    def step_and_save() -> None:
        number = next(numbers)
        step()
        if number == 0:
            checkpointer.save(job)
        if number == steps - 1:
            checkpointer.finish()

    return step_and_save
