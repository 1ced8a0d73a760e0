"""Steps that are skipped, since the loss or a gradient is inf or nan.

One such step would make every weight nan, on every rank, for good. All ranks know of it in time: of the loss by a flag
(ddp/resilience/flags.py), of a gradient because what one rank contributes is in everybody's average. Under GradScaler a gradient that
overflows is no news: the scaler skips that step by itself, on all ranks alike, and lowers its scale.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.errors import UsageError
from ddp.job import Job

logger = logging.getLogger("ddp.train")


def sum_of_gradients(parameters: Iterable[nn.Parameter]) -> Tensor:
    """0-d, and not finite if one element of a gradient is not: the cheapest pass over all of them that can tell, in half the
    time of a norm."""
    return torch.stack([p.grad.sum() for p in parameters if p.grad is not None]).sum()


def invalidate_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """The loss was not finite, but the gradients may be all the same (cross-entropy's are, where it is inf), and GradScaler
    looks at nothing else."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.fill_(math.nan)
            break


def report_skipped(job: Job, losses: list[Tensor]) -> None:
    """Say, once, what was skipped, and write down which samples it was, to be looked at or run again. A collective.

    :param losses: this rank's, one per micro-step of the step that is just over
    :raises UsageError: on every rank, when it is one step too many
    """
    everyone: list[list[float]] = [[]] * job.env.world_size
    dist.all_gather_object(everyone, [loss.item() for loss in losses])
    culprits = {rank: [x for x in own if not math.isfinite(x)] for rank, own in enumerate(everyone)}
    what = [f"the loss was {own[0]} on rank {rank}" for rank, own in culprits.items() if own]
    cause = f"{', '.join(what) or 'a gradient was not finite'} at step {job.step}"
    job.skipped_steps += 1
    job.record("skipped", losses=everyone, samples=job.sampler.global_batch(job.position - 1).tolist())
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
