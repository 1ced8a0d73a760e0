"""Text: lines of different length, in which every character counts alike over all ranks and micro-steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.data import sums
from common.errors import UsageError
from ddp.config import TrainConfig
from ddp.strategies import STRATEGIES
from tests.ddp.checkpoint.sharded_jobs import contents, save_each
from tests.support.launch import run_ranks

PLAIN: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.0, "lr": 0.5, "clip_norm": 1.0}


@pytest.mark.parametrize(("ranks", "grad_accumulation_steps"), [pytest.param(2, 3, marks=pytest.mark.slow), (3, 2)])
def test_a_step_is_that_of_one_process(tmp_path: Path, ranks: int, grad_accumulation_steps: int) -> None:
    """Ragged lines, gradient accumulation and clipping, with every strategy."""
    run_ranks(save_each, 1, tmp_path, ["torch"], PLAIN)
    settings = PLAIN | {"grad_accumulation_steps": grad_accumulation_steps}
    run_ranks(save_each, ranks, tmp_path, list(STRATEGIES), settings)
    expected = contents(tmp_path / "torch-1")
    for strategy in STRATEGIES:
        found = contents(tmp_path / f"{strategy}-{ranks}")
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=f"{strategy}: {name}")


def test_lines_are_sums() -> None:
    data = sums.load(200, 20)
    assert data.train.shape == (1, 1, sums.LENGTH)
    assert data.test_unit == "characters"
    inputs, targets = data.train.images, data.train.labels  # type: ignore[attr-defined]
    for line, following in zip(torch.from_numpy(inputs).flatten(1), torch.from_numpy(targets), strict=True):
        written = data.classes[int(line[0])] + data.text_of(following)
        numbers, result = written.removesuffix(".").split("=")
        assert sum(map(int, numbers.split("+"))) == int(result)
        known = int((following >= 0).sum())
        assert torch.equal(line[1:known], following[: known - 1].to(torch.uint8))  # each predicts the next
    assert len(set((targets >= 0).sum(1).tolist())) > 4  # ragged
    again, _ = sums.write("train", 50)
    assert np.array_equal(again, inputs[:50])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"model": "gpt", "dataset": "glyphs"}, "--model gpt does not learn --dataset glyphs: gpt learns sums"),
        ({"model": "mlp", "dataset": "sums"}, "--model mlp does not learn --dataset sums"),
        ({"width": 64}, "--width is for --model gpt, not for fashion-cnn"),
        ({"layers": 2, "model": "mlp"}, "--layers is for --model gpt, not for mlp"),
        ({"model": "gpt", "width": 100}, "--width 100 is no multiple of 64, the width of a head: use 64 or 128"),
        ({"strategy": "zero1", "compile": "default"}, "--compile is for replicas"),
        ({"strategy": "zero2", "async_checkpoint": True}, "--async-checkpoint is for replicas"),
        (
            {"strategy": "zero3", "check_replicas_every": 5},
            "--check-replicas-every: with --strategy zero3 there are none",
        ),
        (
            {"strategy": "zero3", "all_reduce": "tree"},
            "--all-reduce tree has no reduce-scatter and all-gather for --strategy zero3: use backend",
        ),
        ({"strategy": "fsdp2", "all_reduce": "ring"}, "--all-reduce ring is for the strategies written by hand"),
    ],
)
def test_what_does_not_go_together(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=f"^{problem}"):
        TrainConfig(**settings)
