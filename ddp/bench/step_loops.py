"""Training steps for benchmarks: the trainer's step over many epochs, and a timer whose ranks start together."""

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
    """Yield this rank's batches, epoch after epoch."""
    for epoch in itertools.count():
        job.sampler.set_epoch(epoch)
        yield from job.window.timed(job.guard.batches(job.loader))


def trainer_step(job: Job) -> Callable[[], None]:
    """The step of ``ddp.train`` on successive batches. Metrics are reduced every ``log_every`` steps."""
    job.model.train()
    stream = endless_batches(job)

    def step() -> None:
        train_step(job, stream)
        if job.step % job.config.log_every == 0:
            job.window.reduce(job.env)

    return step


def timed(env: DistEnv, steps: int, run: Callable[[], None]) -> Callable[[], float]:
    """A timer that starts on all ranks at once.

    :param steps: steps that one call of ``run`` takes
    :param run: takes the steps
    :returns: a function that calls ``run`` and returns the seconds of one step
    """

    def timing() -> float:
        dist.barrier()
        began = time.perf_counter()
        run()
        synchronize([env.device])
        return (time.perf_counter() - began) / steps

    return timing
