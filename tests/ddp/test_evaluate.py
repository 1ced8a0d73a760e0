"""ddp/evaluate.py: exact at every world size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common import datasets
from common.datasets import keep_batch
from common.models import build_model
from common.precision import Precision
from common.process_group import process_group
from ddp.evaluate import Evaluation, evaluate, table
from tests.launch import run_ranks


def evaluated(test_samples: int) -> tuple[Evaluation, bool]:
    with process_group() as place:
        data = datasets.load("glyphs", train_samples=100, test_samples=test_samples)
        torch.manual_seed(0)
        network = build_model("fashion-cnn", data.shape, len(data.classes), dropout=0.5)
        result = evaluate(network, data, place, Precision("fp32", place.device))
        return result, network.training


@pytest.mark.parametrize("samples", [2, 301])  # fewer than ranks; and not divisible by any of 2, 3 and 4
def test_every_sample_counts_once_at_every_world_size(samples: int) -> None:
    ((alone, _),) = run_ranks(evaluated, 1, samples)
    assert alone.confusion.sum() == samples
    for world_size in (2, 3, 4):
        for result, training in run_ranks(evaluated, world_size, samples):
            assert np.array_equal(result.confusion, alone.confusion)
            assert result.loss == pytest.approx(alone.loss, rel=1e-5)
            assert training  # left in the mode it was in


def test_it_equals_a_plain_loop() -> None:
    ((result, _),) = run_ranks(evaluated, 1, 301)
    data = datasets.load("glyphs", train_samples=100, test_samples=301)
    torch.manual_seed(0)
    network = build_model("fashion-cnn", data.shape, len(data.classes)).eval()
    images, labels = keep_batch(data.test.__getitems__(datasets.BatchKey(0, np.arange(301))))
    with torch.inference_mode():
        logits = network(data.to_input(images))
    assert result.accuracy == pytest.approx((logits.argmax(1) == labels).float().mean().item())
    assert result.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)


def test_the_columns_of_many_classes_are_numbered() -> None:
    lines = table(Evaluation(0.5, 7 * np.eye(13, dtype=np.int64)), tuple(f"Person_{i}" for i in range(13))).splitlines()
    assert lines[0].split() == [*map(str, range(1, 14)), "<-", "predicted"]
    assert lines[13].split() == ["Person_12", "13", "100.00", "%", *["0"] * 12, "7"]


def test_class_accuracy_and_its_table() -> None:
    result = Evaluation(0.5, np.array([[8, 2, 0], [0, 5, 0], [0, 0, 0]]))
    assert result.accuracy == 13 / 15
    np.testing.assert_equal(result.class_accuracy, [0.8, 1.0, np.nan])
    text = table(result, ("cat", "dog", "emu"))
    assert "80.00 %" in text.splitlines()[1]
    assert "13 of 15 samples" in text.splitlines()[-1]
    assert result.as_dict(("cat", "dog", "emu"))["samples"] == 15
