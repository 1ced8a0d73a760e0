"""Steps that are skipped, since the loss or a gradient is inf or nan.

One such step would make every weight nan, on every rank, for good. All ranks know of it in time: each reports its loss
(ddp/resilience/guard.py), and what one rank contributes to a gradient is in every rank's average.
"""

from __future__ import annotations

import logging
import math

import torch.distributed as dist
from torch import Tensor

from common.errors import UsageError
from ddp.job import Job

logger = logging.getLogger("ddp.train")


def report_skipped(job: Job, step: int, losses: list[Tensor]) -> None:
    """Log a step of the present epoch once, as skipped, and record its samples, to be looked at or run again. A collective.

    :param step: its number, from 1
    :param losses: this rank's, one per micro-step
    :raises UsageError: on every rank, when more than ``--max-skipped-steps`` were skipped
    """
    everyone: list[list[float]] = [[]] * job.env.world_size
    dist.all_gather_object(everyone, [loss.item() for loss in losses])
    not_finite = {rank: [x for x in own if not math.isfinite(x)] for rank, own in enumerate(everyone)}
    what = [f"the loss was {own[0]} on rank {rank}" for rank, own in not_finite.items() if own]
    cause = f"{', '.join(what) or 'a gradient was not finite'} at step {step}"
    job.skipped_steps += 1
    samples = job.sampler.global_batch(step - 1 - job.epoch * job.sampler.steps_per_epoch).tolist()
    job.record("skipped", step, losses=everyone, samples=samples)
    most = job.config.max_skipped_steps
    if job.skipped_steps > most:
        error = UsageError(
            f"{cause}: {job.skipped_steps} steps had to be skipped, more than --max-skipped-steps {most}: try a lower "
            "--lr or --clip-norm, and look at that step's samples, which are in metrics.jsonl; none of these steps has "
            "changed the weights, and --resume continues from the last checkpoint"
        )
        error.seen_by_all = True
        raise error
    if job.env.is_main:
        logger.warning(
            f"{cause}: that step is skipped ({job.skipped_steps} until now); its samples are in metrics.jsonl"
        )
