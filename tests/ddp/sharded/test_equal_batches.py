"""ddp/sharded/equal_batches.py: a rank that has no test samples, or no more, takes part in the others' forward passes."""

from __future__ import annotations

import math
import signal

import numpy as np
import pytest
from torch import Tensor, nn

from common.distributed.dist_env import DistEnv
from common.training.evaluation import Evaluation, evaluate
from ddp.data import load_data
from ddp.rendezvous.process_group import process_group
from ddp.resilience.supervisor import Supervisor
from ddp.sharded.zero1 import ZeRO1
from ddp.strategies import SHARDED
from ddp.train import build_job
from tests.ddp.jobs import small
from tests.support.launch import run_ranks


class Flattening(nn.Module):
    """Takes no batch of no samples, for which torch cannot tell what -1 stands for."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x.view(x.size(0), -1))
        return logits


def flattening(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Flattening(math.prod(shape), classes)


def evaluated(strategies: list[str], stopped: bool) -> list[Evaluation]:
    """With each strategy, on one test sample, which rank 0 has.

    :param stopped: all ranks were asked to stop before
    """
    with process_group(threads=1) as env:
        return [_evaluated(strategy, env, stopped) for strategy in strategies]


def _evaluated(strategy: str, env: DistEnv, stopped: bool) -> Evaluation:
    config = small(strategy=strategy, model=f"{__name__}:flattening", train_samples=144, test_samples=1)
    job = build_job(config, env, load_data(config, env))
    supervisor = Supervisor(job)
    if stopped:
        supervisor.guard.stop.number = signal.SIGTERM
    try:
        shard = supervisor.until_stopped(job.test_loader)
        return evaluate(job.network, job.data, env, config.precision, shard)
    finally:
        if isinstance(job.network, ZeRO1):
            job.network.close()


def test_a_rank_without_samples_takes_part_with_one_that_does_not_count() -> None:
    """A rank without test samples evaluates one that does not count.

    Claim (ddp/sharded/README.md, 9): a rank without test samples takes part in the evaluation with one that does not
    count.
    """
    for replicas, *shards in run_ranks(evaluated, 2, ["torch", *SHARDED], False):
        assert replicas.confusion.sum() == 1
        for result in shards:
            assert np.array_equal(result.confusion, replicas.confusion)
            assert result.loss == pytest.approx(replicas.loss, rel=1e-5)


def test_a_stop_before_the_first_batch_counts_nothing() -> None:
    for results in run_ranks(evaluated, 2, ["torch", *SHARDED], True):
        for result in results:
            assert (result.confusion.sum(), result.loss) == (0, 0.0)
            assert np.isnan(result.class_accuracy).all()
