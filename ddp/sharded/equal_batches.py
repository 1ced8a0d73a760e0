"""Equally many batches on every rank: of a sharded model, each forward pass is a collective."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from common.data.datasets import Batch, ImageData
from common.distributed.dist_env import DistEnv
from common.errors import UsageError
from common.training.evaluation import evaluation_batch_size
from ddp.sampler import ShardSampler
from ddp.sums import NO_TARGET


def equally_many(batches: Iterator[Batch], data: ImageData, env: DistEnv) -> Iterator[Batch]:
    """This rank's batches of the test set, then samples that count for nothing, until it has had as many as rank 0, which has
    most.

    So a rank that stops early, or cannot read a file, still takes part in the forward passes of the others.

    :raises UsageError: at the end, if a file could not be read
    """
    batch_size = evaluation_batch_size(data.shape, env.device)
    rank_0 = ShardSampler(len(data.test), batch_size, env.world_size, 0)
    filler = Batch(torch.zeros(1, *data.shape, dtype=torch.uint8), torch.full((1, *data.label_shape), NO_TARGET))
    error: UsageError | None = None
    for _ in range(len(rank_0)):
        try:
            batch = next(batches, None) if error is None else None
        except UsageError as caught:
            error, batch = caught, None
        yield filler if batch is None else batch
    if error is not None:
        raise error
