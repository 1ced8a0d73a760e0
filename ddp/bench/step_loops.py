"""Training steps for benchmarks: the trainer's own over epoch after epoch, and a way to time some from a common start."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist

from common.data.datasets import Batch
from common.distributed.process_group import DistEnv
from common.reporting.timing import synchronize
from ddp.job import Job
from ddp.train import train_step


def endless_batches(job: Job) -> Iterator[Batch]:
    """This rank's batches, over epoch after epoch."""
    for epoch in itertools.count():
        job.sampler.set_epoch(epoch)
        yield from job.loader


def trainer_step(job: Job) -> Callable[[], None]:
    """``ddp.train``'s step, on one batch after another, with the reduction of its metrics every ``log_every`` steps."""
    job.model.train()
    stream = endless_batches(job)

    def step() -> None:
        train_step(job, stream)
        reduce_metrics(job)

    return step


def reduce_metrics(job: Job) -> None:
    """What a trainer does after a step, every ``log_every`` steps."""
    if job.step % job.config.log_every == 0:
        job.window.reduce(job.env)


def timed(env: DistEnv, steps: int, run: Callable[[], None]) -> Callable[[], float]:
    """:param run: takes ``steps`` steps; all ranks begin with it at once
    :returns: a function that runs it and gives the seconds of one step"""

    def timing() -> float:
        dist.barrier()
        began = time.perf_counter()
        run()
        synchronize([env.device])
        return (time.perf_counter() - began) / steps

    return timing
