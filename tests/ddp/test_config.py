"""ddp/config.py: what follows from the data set, the optimizer and the schedule, and what contradicts itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.data.datasets import Augmentation
from common.errors import UsageError
from ddp.config import TrainConfig, micro_batch_size


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"epochs": 12, "lr": 0.1, "weight_decay": 5e-4, "warmup_epochs": 1.0}),
        ({"optimizer": "adamw"}, {"lr": 0.002, "weight_decay": 0.05}),
        ({"optimizer": "adam", "lr": 0.1}, {"lr": 0.1, "weight_decay": 0.0}),
        ({"epochs": 2}, {"epochs": 2, "warmup_epochs": 0.4}),
        ({"schedule": "one-cycle", "epochs": 10}, {"warmup_epochs": 3.0}),
        ({}, {"model": "fashion-cnn", "batch_size": 144, "loader": "stock", "workers": 0, "image_size": None}),
        (
            {"dataset": "lfw"},
            {"model": "resnet18", "batch_size": 48, "epochs": 15, "min_images_per_person": 40, "image_size": 64},
        ),
        ({"dataset": "lfw"}, {"loader": "fast", "workers": None, "decoder": "pillow", "data_dir": None}),
        (
            {"dataset": "folder", "data_dir": "d"},
            {
                "model": "resnet18",
                "image_size": 64,
                "decoder": None,
                "loader": "fast",
                "run_dir": Path("runs/folder-resnet18"),
            },
        ),
        (
            {"dataset": "own:load", "model": "own:build"},
            {"loader": "stock", "augmentation": Augmentation(), "run_dir": Path("runs/own.load-own.build")},
        ),
        ({"model": "resnet50"}, {"image_size": 224, "batch_size": 144, "run_dir": Path("runs/glyphs-resnet50")}),
        ({"model": "resnet50", "dataset": "fashion-mnist"}, {"image_size": None}),
        ({"dataset": "fashion-mnist"}, {"augmentation": Augmentation(shift=1, flip=True)}),
    ],
)
def test_what_is_not_given_follows(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    config = TrainConfig(**settings)
    assert {name: getattr(config, name) for name in expected} == expected


@given(batch_size=st.integers(1, 500), world_size=st.integers(1, 9), grad_accumulation_steps=st.integers(1, 9))
def test_a_global_batch_divides_or_names_the_nearest_that_do(
    batch_size: int, world_size: int, grad_accumulation_steps: int
) -> None:
    parts = world_size * grad_accumulation_steps
    if batch_size % parts == 0:
        assert micro_batch_size(batch_size, world_size, grad_accumulation_steps) * parts == batch_size
        return
    with pytest.raises(UsageError) as error:
        micro_batch_size(batch_size, world_size, grad_accumulation_steps)
    nearest = [int(word) for word in str(error.value).split("use ")[1].split(" or ")]
    for size in nearest:
        assert micro_batch_size(size, world_size, grad_accumulation_steps) >= 1
        assert abs(size - batch_size) < parts
    assert max(nearest) == math.ceil(batch_size / parts) * parts


def test_the_ddp_by_hand_has_the_all_reduce_of_the_backend() -> None:
    assert TrainConfig(strategy="handwritten").all_reduce == "backend"
