"""The cost of fault tolerance (``python -m ddp.bench safety``).

Five loops take turns, a chunk of steps each. Each loop has its own model:

- ``plain``: the step with the guard that does nothing: no flags, no check of the gradients, no saved statistics, no
  watchdog. ``plain again`` is the same loop a second time: the difference between the two is noise.
- ``guarded``: the step of ``ddp.train``, with flags attached to the loss and all-reduced, the check for inf and nan, and the
  watchdog. No checkpoint.
- ``saving in the background``: ``guarded`` with one checkpoint in each chunk; the chunk ends when it is on the disk.
- ``saving``: the same, but training waits for the disk.

Each guard is also timed by itself, since all guards together cost less than two steps differ from each other.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from common.cli import option, parse
from common.distributed.process_group import DistEnv
from common.reporting.timing import interleave, synchronize
from common.reporting.turns import Step, cells
from common.training.metrics import MetricsWriter
from common.training.recipes import load_dataset
from ddp.bench.overhead import OverheadConfig, measure, report, trainer_step
from ddp.bench.variants import DDPVariant
from ddp.checkpoint.checkpointer import Checkpointer
from ddp.job import Job, StepGuard
from ddp.resilience.flags import NO_FLAGS, WithFlags
from ddp.resilience.guard import ResilientGuard, sum_of_gradients
from ddp.train import build_job

LIMIT = 1.03
PLAIN, AGAIN, GUARDED, BACKGROUND, WAITING = "plain", "plain again", "guarded", "saving in the background", "saving"
AGAINST = {AGAIN: PLAIN, GUARDED: PLAIN, BACKGROUND: GUARDED, WAITING: GUARDED}
OUT_OF_CACHE = 2**24  # float32 elements, 64 MiB; writing them empties the caches, as a step does


@dataclass(frozen=True)
class SafetyConfig(OverheadConfig):
    """Settings of ``ddp.bench safety``."""

    builds: int = option(8, "times that all loops are rebuilt", minimum=1)
    rounds: int = option(3, "rounds per build that count", minimum=2)
    steps: int = option(50, "steps of each loop in a round; loops that save write one checkpoint in them", minimum=1)
    looks: int = option(300, "times that each guard is timed by itself", minimum=2)
    output: Path = option(
        Path("runs/bench-safety"),
        "folder of the JSON and the PNG; it holds the checkpoints while the benchmark runs",
        per_node=True,
    )


def main(argv: Sequence[str]) -> None:
    config = parse(SafetyConfig, "ddp.bench safety", __doc__, argv)
    run = config.training
    with config.start() as env:
        data = load_dataset(run)

        def job() -> Job:
            return build_job(run, env, data)

        def guarded(stack: ExitStack) -> Job:
            own = job()
            stack.enter_context(own.watchdog)
            return own

        with _folder(run.run_dir, env), MetricsWriter(run.run_dir, silent=not env.is_main) as metrics:

            def saving(in_background: bool, stack: ExitStack) -> Step:
                checkpointer = Checkpointer(replace(run, async_checkpoint=in_background), env, metrics)
                return saving_step(guarded(stack), checkpointer, config.steps)

            loops: dict[str, Callable[[ExitStack], Step]] = {
                PLAIN: lambda _: trainer_step(without_guard(job())),
                AGAIN: lambda _: trainer_step(without_guard(job())),
                GUARDED: lambda stack: trainer_step(guarded(stack)),
                BACKGROUND: functools.partial(saving, True),
                WAITING: functools.partial(saving, False),
            }
            seconds = measure(config, env, loops)
        guards = time_guards(job(), config.looks)
        together = statistics.median(map(sum, zip(*guards.values(), strict=True)))
        lines = [f"{name:>24}: {milliseconds} ms" for name, milliseconds in cells(guards, ".3f", 1e3).items()]
        share = f"{100 * together / statistics.median(seconds[PLAIN]):.2f} % of a plain step"
        lines.append(f"all guards by themselves: {1e3 * together:.3f} ms, {share}")
        content = {"steps_per_checkpoint": config.steps, "seconds_of_guards": guards}
        report(config, env, "safety", seconds, AGAINST, LIMIT, content, lines)


def without_guard(job: Job) -> Job:
    """The job with the guard that does nothing, and its network in a DDP without flags."""
    job.guard = StepGuard()
    job.model = DDPVariant("torch").wrap(job.network)
    return job


def saving_step(job: Job, checkpointer: Checkpointer, steps: int) -> Step:
    """The trainer's step. Of each ``steps`` the first saves, and the last waits until that is written."""
    step, numbers = trainer_step(job), itertools.cycle(range(steps))

    def step_and_save() -> None:
        number = next(numbers)
        step()
        if number == 0:
            checkpointer.save(job)
        if number == steps - 1:
            checkpointer.finish()

    return step_and_save


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


def time_guards(job: Job, rounds: int) -> dict[str, list[float]]:
    """Measure the seconds that each guard takes in a step.

    Each is timed by itself, with cold caches but for the gradients, which DDP has just written in a step.

    :param job: its gradients are replaced by ones
    :param rounds: how often each guard is timed
    :returns: for each guard its seconds, one entry per round
    """
    network, device, guard = job.network, job.env.device, job.guard
    assert isinstance(guard, ResilientGuard)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    flagged = WithFlags(nn.Identity(), device)
    loss = torch.ones((), device=device, requires_grad=True)
    others = torch.zeros(OUT_OF_CACHE, device=device)

    def check_gradients() -> None:
        sum_of_gradients(network.parameters()).isfinite().item()

    def attach_flags() -> None:
        flagged.attach(loss * 1, NO_FLAGS).backward()
        flagged.reduced()

    def seconds(work: Callable[[], object]) -> float:
        others.add_(1)
        torch._foreach_mul_(gradients, 1.0)
        synchronize([device])
        began = time.perf_counter()
        work()
        synchronize([device])
        return time.perf_counter() - began

    guards = {"check of the gradients": check_gradients, "flags": attach_flags, "statistics saved": guard.save}
    return interleave({name: functools.partial(seconds, work) for name, work in guards.items()}, rounds, warmup=5)
