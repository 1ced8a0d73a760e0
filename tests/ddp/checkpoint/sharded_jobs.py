"""The jobs of the tests of sharded checkpoints: a tiny transformer, saved by one strategy and resumed by another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.distributed.dist_env import DistEnv
from common.training.metrics import MetricsWriter
from ddp.checkpoint.checkpointer import Checkpointer
from ddp.checkpoint.state import restore
from ddp.checkpoint.storage import RunCheckpoint
from ddp.config import TrainConfig
from ddp.data import load_data
from ddp.job import Job
from ddp.rendezvous.process_group import process_group
from ddp.sharded.zero1 import ZeRO1
from ddp.train import build_job, train_step
from tests.ddp.jobs import newest, tensors_of

STEPS = 2  # before the checkpoint, and again after it
# Blocks of 49,920 parameters, which are units; 12 lines divide over 1, 2, 3, 4 and 6 ranks.
TINY: dict[str, Any] = {
    "model": "gpt", "width": 64, "layers": 2, "train_samples": 72, "test_samples": 5, "batch_size": 12, "epochs": 1,
    "optimizer": "adamw", "schedule": "constant", "warmup_epochs": 0.0,
}  # fmt: skip


class Resumed(NamedTuple):
    """The outcome of a job of another layout that continued from a checkpoint.

    :param differences: names of tensors that are not the same bits, when it saves them again at once
    :param losses: of the global batch, in each step after the checkpoint
    """

    differences: list[str]
    losses: list[float]


def save_each(folder: Path, strategies: list[str], settings: dict[str, Any] | None = None) -> None:
    """Train each strategy for :data:`STEPS` steps, and save it into ``folder/STRATEGY-RANKS``."""
    with process_group(threads=1) as env:
        for strategy in strategies:
            with job_of(strategy, env, settings or {}) as job:
                steps(job, STEPS)
                save(job, folder / f"{strategy}-{env.world_size}")


def resume_each(folder: Path, saved: list[str], strategies: list[str], settings: dict[str, Any] | None = None) -> Any:
    """Resume each checkpoint of :func:`save_each` with each strategy, here.

    :returns: by checkpoint and strategy
    """
    with process_group(threads=1) as env:
        return {
            (one, strategy): _resumed(folder / one, folder / f"again-{one}-{strategy}", strategy, env, settings or {})
            for one in saved
            for strategy in strategies
        }


def _resumed(saved: Path, again: Path, strategy: str, env: DistEnv, settings: dict[str, Any]) -> Resumed:
    with job_of(strategy, env, settings, found=newest(saved)) as job:
        save(job, again)
        differences = []
        if env.is_main:
            before, after = contents(saved), contents(again)
            assert before.keys() == after.keys()
            differences = [name for name in before if not torch.equal(before[name], after[name])]
        return Resumed(differences, steps(job, STEPS))


@contextlib.contextmanager
def job_of(strategy: str, env: DistEnv, settings: dict[str, Any], found: RunCheckpoint | None = None) -> Iterator[Job]:
    """A job, resumed or new."""
    config = TrainConfig(**{**TINY, "strategy": strategy, **settings})
    config.check(env.world_size)
    job = build_job(config, env, load_data(config, env), found)
    if found is not None:
        restore(job, *found)
    try:
        yield job
    finally:
        if isinstance(job.network, ZeRO1):
            job.network.close()


def steps(job: Job, count: int) -> list[float]:
    """Train so many steps; the mean loss of each over all ranks."""
    job.sampler.set_epoch(job.epoch, first_step=job.step_in_epoch)
    batches, losses = job.guard.batches(job.loader), []
    for _ in range(count):
        job.window.reduce(job.env)
        train_step(job, batches)
        losses.append(job.window.reduce(job.env).loss)
    return losses


def save(job: Job, run_dir: Path) -> None:
    """Write a checkpoint into a run of its own."""
    with job.env.fail_together():
        if job.env.is_main:
            run_dir.mkdir()
    config = TrainConfig(**{**vars(job.config), "run_dir": run_dir})
    Checkpointer(config, job.env, MetricsWriter(run_dir, silent=not job.env.is_main)).save(job)


def contents(run_dir: Path) -> dict[str, Tensor]:
    """The weights and the optimizer's state of a run's newest checkpoint, whole."""
    return {name: value for name, value in tensors_of(newest(run_dir).path).items() if not name.startswith("rank")}
