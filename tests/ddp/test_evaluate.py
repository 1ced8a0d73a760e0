"""ddp/evaluate.py: exact at every world size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.data import datasets
from common.models.build import build_model
from common.training.evaluation import Evaluation, evaluate
from ddp.config import TrainConfig
from ddp.data import open_test_loader
from ddp.rendezvous.process_group import process_group
from tests.support.launch import run_ranks


def evaluated(test_samples: int) -> tuple[Evaluation, bool]:
    with process_group() as env:
        data = datasets.load("glyphs", train_samples=100, test_samples=test_samples)
        torch.manual_seed(0)
        network = build_model("fashion-cnn", data.shape, len(data.classes), dropout=0.5)
        result = evaluate(network, data, env, "fp32", open_test_loader(data, env, TrainConfig()))
        return result, network.training


@pytest.mark.parametrize("samples", [2, 301])  # fewer than ranks; and not divisible by any of 2, 3 and 4
def test_every_sample_counts_once_at_every_world_size(samples: int) -> None:
    """Every sample counts once at every world size.

    Claim (README.md): evaluation counts every sample once.
    Claim (ddp/README.md, 8): evaluation is exact, at another world size too.
    """
    ((alone, _),) = run_ranks(evaluated, 1, samples)
    assert alone.confusion.sum() == samples
    for world_size in (2, 3, 4):
        for result, training in run_ranks(evaluated, world_size, samples):
            assert np.array_equal(result.confusion, alone.confusion)
            assert result.loss == pytest.approx(alone.loss, rel=1e-5)
            assert training  # left in the mode it was in
