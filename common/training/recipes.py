"""The settings that all trainers share, and the recipes that fill in what is not given."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.command_line.cli import is_function_name, option
from common.data import datasets, fashion_mnist
from common.data.datasets import IN_MEMORY, Augmentation, ImageData
from common.data.enlarged import enlarge
from common.data.own_dataset import load_own
from common.errors import UsageError
from common.models.build import LEAST_SAMPLES, MODELS
from common.training.optimization import learning_rate
from common.training.precision import PRECISIONS

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "cosine", "one-cycle")

# The defaults of each data set.
_PHOTOS: dict[str, Any] = {"model": "resnet18", "epochs": 15, "batch_size": 48, "shift": 4, "flip": True}
RECIPES: dict[str, dict[str, Any]] = {
    "glyphs": {"model": "fashion-cnn", "epochs": 12, "batch_size": 144, "shift": 3, "flip": False},
    "fashion-mnist": {"model": "fashion-cnn", "epochs": 10, "batch_size": 144, "shift": 1, "flip": True},
    "lfw": _PHOTOS,
    "folder": _PHOTOS,
    "sums": {"model": "gpt", "epochs": 10, "batch_size": 96, "shift": 0, "flip": False},
}
# Nothing is known of a user's own data set, so its images are left as they are.
OWN_RECIPE: dict[str, Any] = {"model": "fashion-cnn", "epochs": 10, "batch_size": 144, "shift": 0, "flip": False}
IMAGE_SIZES = {"resnet50": 224}  # to which glyphs are enlarged for a model
LEARNING_RATES = {"sgd": 0.1, "adam": 0.002, "adamw": 0.002}
WEIGHT_DECAYS = {"sgd": 5e-4, "adam": 0.0, "adamw": 0.05}
ONE_CYCLE_WARMUP = 0.3  # share of the run, as in torch.optim.lr_scheduler.OneCycleLR


@dataclass(frozen=True)
class LearningConfig:
    """The settings that trainers share. Each trainer derives its own configuration and adds how it divides the work.

    A field whose option is None follows from the data set, the optimizer or the schedule, and is filled in on construction.

    :raises UsageError: for settings that contradict each other
    """

    # The model and its data
    dataset: str = option(
        "glyphs", "the data set, or your own: a function load() in a module", choices=IN_MEMORY, or_function=True
    )
    data_dir: str = option(
        None,
        "of fashion-mnist: torchvision's layout or its four *-ubyte.gz files (default: ./data, or Debian's)",
        per_node=True,
    )
    download: bool = option(False, "let one process per node download fashion-mnist to --data-dir first")
    train_samples: int | None = option(None, "train on the first so many samples only", minimum=1)
    test_samples: int | None = option(None, "test on the first so many samples only", minimum=1)
    image_size: int = option(
        None,
        "height and width to which glyphs are enlarged, with three channels: a multiple of 28 (default: as they are; 224 for "
        "resnet50)",
        minimum=8,
        maximum=1024,
    )
    augment: bool = option(
        True, "shift (and, except for glyphs, mirror) the training images; your own are left as they are"
    )
    model: str = option(
        None,
        "the model, or your own: a function build(shape, classes) in a module (default: fashion-cnn)",
        choices=MODELS,
        or_function=True,
    )
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
    tf32: bool = option(
        True,
        "on GPUs, let fp32's convolutions and matrix products round their inputs to TF32, 10 bits of mantissa instead of 23: "
        "tensor cores are several times as fast; with --no-tf32, fp32 is fp32",
    )
    deterministic: bool = option(
        False,
        "use deterministic algorithms only, which are slower: on the same GPUs, a run then repeats itself bit for bit",
    )
    cudnn_benchmark: bool = option(
        False, "let cuDNN time its algorithms and take the fastest, which may be another in each run"
    )
    channels_last: bool = option(True, "keep images as NHWC, which convolutions prefer")

    def __post_init__(self) -> None:
        if self.dataset == "fashion-mnist":
            self._default("data_dir", "data" if self.download else str(fashion_mnist.default_folder()))
        elif self.download:
            raise UsageError(f"--download is for fashion-mnist: {self.dataset} cannot be downloaded")
        for name in ("model", "epochs", "batch_size"):
            self._default(name, self._recipe[name])
        if self.dataset == "glyphs":
            self._default("image_size", IMAGE_SIZES.get(self.model))
            self._check_enlargement()
        self._default("lr", LEARNING_RATES[self.optimizer])
        self._default("weight_decay", WEIGHT_DECAYS[self.optimizer])
        one_cycle = self.schedule == "one-cycle"
        self._default("warmup_epochs", ONE_CYCLE_WARMUP * self.epochs if one_cycle else min(1.0, self.epochs / 5))
        if self.deterministic and self.cudnn_benchmark:
            raise UsageError(
                "--deterministic and --cudnn-benchmark contradict each other: the fastest algorithm may be another in each run: "
                "give one of them"
            )
        if self.warmup_epochs > self.epochs:
            raise UsageError(f"--warmup-epochs {self.warmup_epochs:g} is longer than --epochs {self.epochs}")

    def _check_enlargement(self) -> None:
        if self.image_size is not None:
            from common.data.glyphs import SIDE  # and Pillow with it

            if self.image_size % SIDE:
                nearest = max(1, round(self.image_size / SIDE)) * SIDE
                raise UsageError(
                    f"--image-size {self.image_size} is no multiple of {SIDE}, the size of a glyph: use {nearest}"
                )

    def _default(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)  # only here, during construction, is the frozen dataclass completed

    @property
    def _recipe(self) -> dict[str, Any]:
        return OWN_RECIPE if is_function_name(self.dataset) else RECIPES[self.dataset]

    @property
    def run_name(self) -> str:
        """For the default run directory: data set and model, with ``:`` replaced."""
        return f"{self.dataset}-{self.model}".replace(":", ".")

    def as_json(self) -> dict[str, Any]:
        """The settings in JSON's types."""
        settings = dataclasses.asdict(self)
        return {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}

    @property
    def augmentation(self) -> Augmentation:
        """The augmentation of the data set's recipe; none with ``--no-augment``."""
        return Augmentation(self._recipe["shift"], self._recipe["flip"]) if self.augment else Augmentation()

    @property
    def memory_format(self) -> torch.memory_format:
        """The memory format of the images and the model."""
        return torch.channels_last if self.channels_last else torch.contiguous_format

    @property
    def less_memory(self) -> list[str]:
        """Flags that let a device hold less."""
        shorter = ["--precision bf16"] if self.precision == "fp32" else []
        return [f"less than --batch-size {self.batch_size}", *shorter]

    def learning_rates(self, steps_per_epoch: int) -> Callable[[int], float]:
        """The learning rate as a function of the optimizer step, counted from 0 over all epochs."""
        warmup_steps = self.warmup_epochs * steps_per_epoch
        return functools.partial(
            learning_rate,
            schedule=self.schedule,
            peak=self.lr,
            warmup_steps=warmup_steps if self.schedule == "one-cycle" else round(warmup_steps),
            total_steps=self.epochs * steps_per_epoch,
        )


def load_dataset(config: LearningConfig) -> ImageData:
    """The data set: one of :data:`common.data.datasets.IN_MEMORY`, or one's own.

    :raises UsageError: as :func:`common.data.datasets.load` and :func:`common.data.own_dataset.load_own`; for an image size
        that the data set cannot have
    """
    settings: dict[str, Any] = {
        "train_samples": config.train_samples,
        "test_samples": config.test_samples,
        "augmentation": config.augmentation,
        "seed": config.seed,
    }
    if config.image_size is not None and config.dataset != "glyphs":
        raise UsageError(
            f"--image-size {config.image_size} is for glyphs and files: {config.dataset} has images of one size"
        )
    if not is_function_name(config.dataset):
        data = datasets.load(config.dataset, Path(config.data_dir) if config.data_dir else None, **settings)
        if config.image_size is None:
            return data
        return enlarge(data, config.image_size)
    if config.data_dir is not None:
        raise UsageError(f"--data-dir {config.data_dir} is not passed to --dataset {config.dataset}: leave it out")
    return load_own(config.dataset, **settings)


def require_a_batch(config: LearningConfig, data: ImageData, parts: int) -> None:
    """:param parts: into which a batch is cut, equally: ranks times micro-steps, or devices
    :raises UsageError: when the training samples do not fill a single batch, with the largest that they fill
    """
    samples = len(data.train)
    if samples >= config.batch_size:
        return
    largest, least = samples // parts * parts, LEAST_SAMPLES.get(config.model, 1) * parts
    remedy = f"use --batch-size {largest}" if largest >= least else f"{parts} parts of a batch need {least}"
    raise UsageError(f"--batch-size {config.batch_size} is more than the {samples} training samples: {remedy}")
