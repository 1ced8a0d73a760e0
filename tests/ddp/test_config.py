"""ddp/config.py: what follows from the data set, the optimizer and the schedule, and what contradicts itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cli import parse
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"download": True}, "--download is for fashion-mnist"),
        ({"loader": "fast"}, "--loader fast is for lfw and folder: glyphs"),
        ({"min_images_per_person": 40}, "--min-images-per-person is for lfw: glyphs"),
        (
            {"image_size": 64, "dataset": "fashion-mnist"},
            "--image-size is for lfw and folder and glyphs: fashion-mnist",
        ),
        ({"image_size": 100}, "--image-size 100 is no multiple of 28, the size of a glyph: use 112"),
        ({"decoder": "pillow", "dataset": "folder", "data_dir": "d"}, "--decoder is for lfw: folder does not take it"),
        ({"dataset": "folder"}, "--dataset folder needs --data-dir DIR"),
        ({"dataset": "own:load", "loader": "fast"}, "--loader fast is for lfw and folder: own:load has no files"),
        ({"warmup_epochs": 4.0, "epochs": 3}, "--warmup-epochs 4 is longer than --epochs 3"),
        (
            {"deterministic": True, "cudnn_benchmark": True},
            "--deterministic and --cudnn-benchmark contradict each other",
        ),
        ({"bucket_mib": 4.0, "strategy": "naive"}, "--bucket-mib 4.0 is for --strategy torch and handwritten: naive"),
        ({"gradient_precision": "bf16", "strategy": "fsdp2"}, "--gradient-precision bf16 is for --strategy torch and"),
        (
            {"gradient_precision": "bf16", "strategy": "handwritten", "all_reduce": "ring"},
            "--gradient-precision bf16 is summed by the backend: leave out --all-reduce ring",
        ),
        (
            {"compile": "reduce-overhead", "grad_accumulation_steps": 2},
            "--compile reduce-overhead uses CUDA graphs.*--grad-accumulation-steps 1 instead of 2",
        ),
        ({"model": "gpt", "dataset": "glyphs"}, "--model gpt does not learn --dataset glyphs: gpt learns sums"),
        ({"width": 64}, "--width is for --model gpt, not for fashion-cnn"),
        ({"model": "gpt", "width": 100}, "--width 100 is no multiple of 64, the width of a head: use 64 or 128"),
        ({"strategy": "zero1", "compile": "default"}, "--compile is for replicas"),
        ({"strategy": "zero2", "async_checkpoint": True}, "--async-checkpoint is for replicas"),
        ({"strategy": "zero3", "check_replicas_every": 5}, "--check-replicas-every is for replicas"),
        (
            {"strategy": "zero3", "all_reduce": "tree"},
            "--all-reduce tree has no reduce-scatter and all-gather for --strategy zero3: use backend",
        ),
        ({"strategy": "fsdp2", "all_reduce": "ring"}, "--all-reduce ring is for the strategies written by hand"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainConfig(**settings)


# A value of each flag that is just out of its range.
OUT_OF_RANGE = (
    "lr=0 momentum=1 weight-decay=-1 dropout=1 label-smoothing=1 clip-norm=0 epochs=0 batch-size=0 train-samples=0 "
    "test-samples=0 grad-accumulation-steps=0 warmup-epochs=-1 bucket-mib=0 threads=-1 timeout=0 workers=-1 keep-last=0 "
    "max-skipped-steps=-1 check-replicas-every=0 log-every=0 image-size=4 min-images-per-person=1"
)


@pytest.mark.parametrize("flag", OUT_OF_RANGE.split())
def test_a_value_out_of_its_range_is_refused(flag: str) -> None:
    with pytest.raises(UsageError, match=rf"^--{flag.partition('=')[0]} .* is out of range: it must be "):
        parse(TrainConfig, "ddp.train", None, [f"--{flag}"])


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


def test_an_all_reduce_by_hand_is_for_the_ddp_by_hand() -> None:
    with pytest.raises(UsageError, match="add --strategy handwritten"):
        TrainConfig(all_reduce="ring")
    assert TrainConfig(strategy="handwritten").all_reduce == "backend"
