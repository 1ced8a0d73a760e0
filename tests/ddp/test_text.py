"""Text: lines of different length, in which every character counts alike over all ranks and micro-steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp import sums
from ddp.strategies import STRATEGIES
from tests.ddp.checkpoint.sharded_jobs import contents, save_each
from tests.support.launch import run_ranks

PLAIN: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.0, "lr": 0.5, "clip_norm": 1.0}


def test_a_step_is_that_of_one_process(tmp_path: Path) -> None:
    """With every strategy, a step of ragged lines, accumulation and clipping is that of one process.

    Ragged lines, gradient accumulation and clipping, with every strategy.

    Claim (ddp/sharded/README.md, 9): a step of ragged lines, micro-steps and clipping is that of one process, with
    every strategy.
    """
    run_ranks(save_each, 1, tmp_path, ["torch"], PLAIN)
    run_ranks(save_each, 3, tmp_path, list(STRATEGIES), PLAIN | {"grad_accumulation_steps": 2})
    expected = contents(tmp_path / "torch-1")
    for strategy in STRATEGIES:
        trained = contents(tmp_path / f"{strategy}-3")
        assert trained.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6, msg=f"{strategy}: {name}")


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
