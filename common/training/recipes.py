"""What is learned, and how: the settings that all trainers take, and the recipes that fill in what is not given."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.cli import option
from common.data import datasets, fashion_mnist
from common.data.augmentation import Augmentation
from common.data.datasets import IN_MEMORY, ImageData
from common.errors import UsageError
from common.training.models import MODELS
from common.training.optimization import learning_rate
from common.training.precision import PRECISIONS

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "cosine", "one-cycle")

# What a data set is trained with unless a flag says otherwise.
RECIPES: dict[str, dict[str, Any]] = {
    "glyphs": {"model": "fashion-cnn", "epochs": 12, "batch_size": 144, "shift": 3, "flip": False},
    "fashion-mnist": {"model": "fashion-cnn", "epochs": 10, "batch_size": 144, "shift": 1, "flip": True},
    "lfw": {"model": "resnet18", "epochs": 15, "batch_size": 48, "shift": 4, "flip": True},
}
LEARNING_RATES = {"sgd": 0.1, "adam": 0.002, "adamw": 0.002}
WEIGHT_DECAYS = {"sgd": 5e-4, "adam": 0.0, "adamw": 0.05}
ONE_CYCLE_WARMUP = 0.3  # share of the run, as in torch.optim.lr_scheduler.OneCycleLR


@dataclass(frozen=True)
class LearningConfig:
    """The settings that trainers share; each derives its own configuration, and adds how it divides the work.

    A field whose option is None follows from the data set, the optimizer or the schedule, and is filled in on construction.

    :raises UsageError: for settings that contradict each other
    """

    # What is learned, and from what
    dataset: str = option("glyphs", "what to train on", choices=IN_MEMORY)
    data_dir: str = option(
        None, "of fashion-mnist: torchvision's layout or its four *-ubyte.gz files (default: ./data, or Debian's)"
    )
    download: bool = option(False, "let one process per node download fashion-mnist to --data-dir first")
    train_samples: int | None = option(None, "train on the first so many samples only", minimum=1)
    test_samples: int | None = option(None, "test on the first so many samples only", minimum=1)
    augment: bool = option(True, "shift (and, except for glyphs, mirror) the training images")
    model: str = option(None, "what to train (default: fashion-cnn)", choices=MODELS)
    dropout: float = option(0.25, "dropout probability of fashion-cnn and mlp", minimum=0, below=1)

    # The optimization
    epochs: int = option(None, "passes over the training set (default: 12 on glyphs, 10 on fashion-mnist)", minimum=1)
    batch_size: int = option(None, "samples per optimizer step, over all devices (default: 144)", minimum=1)
    optimizer: str = option("sgd", "sgd is with Nesterov momentum", choices=OPTIMIZERS)
    lr: float = option(None, "peak learning rate (default: 0.1 for sgd, 0.002 for adam and adamw)", above=0)
    momentum: float = option(0.9, "of sgd", minimum=0, below=1)
    weight_decay: float = option(None, "default: 5e-4 for sgd, 0 for adam, 0.05 for adamw", minimum=0)
    schedule: str = option("cosine", "of the learning rate, per step", choices=SCHEDULES)
    warmup_epochs: float = option(
        None,
        "rise of the learning rate from 0, in epochs (default: 1, at most a fifth of the run; one-cycle: 30 % of it)",
        minimum=0,
    )
    label_smoothing: float = option(0.0, "share of the target spread over all classes", minimum=0, below=1)
    clip_norm: float | None = option(None, "clip the gradients' total norm to this (default: no clipping)", above=0)
    seed: int = option(0, "of the weights, the shuffling, the augmentation and the dropout", minimum=0)

    # How it is computed
    precision: str = option(
        "fp32", "bf16 and fp16 are automatic mixed precision; fp16 with GradScaler", choices=PRECISIONS
    )
    channels_last: bool = option(True, "keep images as NHWC, which convolutions prefer")

    def __post_init__(self) -> None:
        if self.dataset == "fashion-mnist":
            self._default("data_dir", "data" if self.download else str(fashion_mnist.default_folder()))
        elif self.download:
            raise UsageError(f"--download is for fashion-mnist: {self.dataset} has no such place on the internet")
        for name in ("model", "epochs", "batch_size"):
            self._default(name, RECIPES[self.dataset][name])
        self._default("lr", LEARNING_RATES[self.optimizer])
        self._default("weight_decay", WEIGHT_DECAYS[self.optimizer])
        one_cycle = self.schedule == "one-cycle"
        self._default("warmup_epochs", ONE_CYCLE_WARMUP * self.epochs if one_cycle else min(1.0, self.epochs / 5))
        if self.warmup_epochs > self.epochs:
            raise UsageError(f"--warmup-epochs {self.warmup_epochs:g} is longer than --epochs {self.epochs}")

    def _default(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)  # the one moment at which a frozen dataclass may still be completed

    def as_json(self) -> dict[str, Any]:
        """The settings as JSON has them."""
        settings = dataclasses.asdict(self)
        return {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}

    @property
    def augmentation(self) -> Augmentation:
        """What the recipe of the data set does to training images; nothing with ``--no-augment``."""
        recipe = RECIPES[self.dataset]
        return Augmentation(recipe["shift"], recipe["flip"]) if self.augment else Augmentation()

    @property
    def memory_format(self) -> torch.memory_format:
        """Of the images and the model."""
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def rate_at(self, step: int, steps_per_epoch: int) -> float:
        """The learning rate of optimizer step ``step``, counted from 0 over all epochs."""
        return learning_rate(
            step,
            schedule=self.schedule,
            peak=self.lr,
            warmup_steps=round(self.warmup_epochs * steps_per_epoch),
            total_steps=self.epochs * steps_per_epoch,
        )


def load_in_memory(config: LearningConfig) -> ImageData:
    """The data set, one of :data:`common.data.datasets.IN_MEMORY`.

    :raises UsageError: as :func:`common.data.datasets.load`
    """
    return datasets.load(
        config.dataset,
        Path(config.data_dir) if config.data_dir else None,
        train_samples=config.train_samples,
        test_samples=config.test_samples,
        augmentation=config.augmentation,
        seed=config.seed,
    )


def require_a_batch(config: LearningConfig, data: ImageData) -> None:
    """:raises UsageError: when the training samples do not fill a single batch"""
    if len(data.train) < config.batch_size:
        raise UsageError(f"--batch-size {config.batch_size} is more than the {len(data.train)} training samples")
