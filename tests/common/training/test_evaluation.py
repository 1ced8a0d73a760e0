"""common/training/evaluation.py: what is counted, and how it is told. (Over ranks: tests/ddp/test_evaluate.py.)"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.data import datasets
from common.data.datasets import BatchKey, fetch_batches
from common.distributed.dist_env import DistEnv
from common.models.build import build_model
from common.training.evaluation import Evaluation, evaluate, evaluation_batch_size, table


def test_it_equals_a_plain_loop() -> None:
    data = datasets.load("glyphs", train_samples=100, test_samples=301)
    network = build_model("fashion-cnn", data.shape, len(data.classes), dropout=0.5)
    env = DistEnv.alone(torch.device("cpu"))
    samples = np.arange(301)
    result = evaluate(network, data, env, "fp32", fetch_batches(data.test, samples, 50))
    assert network.training  # left in the mode it was in
    network.eval()
    images, labels = data.test.__getitems__(BatchKey(0, samples))
    with torch.inference_mode():
        logits = network(data.to_input(images))
    assert result.confusion.sum() == 301
    assert result.accuracy == pytest.approx((logits.argmax(1) == labels).float().mean().item())
    assert result.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)


def test_a_stop_before_the_first_batch_counts_nothing() -> None:
    data = datasets.load("glyphs", train_samples=100, test_samples=1)
    network = build_model("mlp", data.shape, len(data.classes))
    result = evaluate(network, data, DistEnv.alone(torch.device("cpu")), "fp32", [])
    assert (result.confusion.sum(), result.loss) == (0, 0.0)
    assert np.isnan(result.class_accuracy).all()


@pytest.mark.parametrize(
    ("device", "side", "samples"),
    [("cpu", 28, 500), ("cpu", 64, 95), ("cpu", 1000, 32), ("cpu", 8, 500), ("cuda", 28, 2048), ("cuda", 224, 32)],
)
def test_of_larger_images_fewer_are_evaluated_at_once_and_more_on_a_gpu(device: str, side: int, samples: int) -> None:
    assert evaluation_batch_size((3, side, side), torch.device(device)) == samples


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
    assert "13 of 15 characters" in table(result, ("cat", "dog", "emu"), "characters")
    assert result.as_dict(("cat", "dog", "emu"))["samples"] == 15
