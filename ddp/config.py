"""What ``ddp.train`` can be told, checked once, on every rank alike, before anything is done."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import fashion_mnist
from common.augmentation import Augmentation
from common.cli import UsageError, option
from common.datasets import DATASETS
from common.models import MODELS
from common.precision import PRECISIONS
from common.process_group import BACKENDS, DEVICES

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "cosine", "one-cycle")

# What a data set is trained with unless a flag says otherwise.
RECIPES: dict[str, dict[str, Any]] = {
    "glyphs": {"epochs": 12, "shift": 3, "flip": False},
    "fashion-mnist": {"epochs": 10, "shift": 1, "flip": True},
}
LEARNING_RATES = {"sgd": 0.1, "adam": 0.002, "adamw": 0.002}
WEIGHT_DECAYS = {"sgd": 5e-4, "adam": 0.0, "adamw": 0.05}
ONE_CYCLE_WARMUP = 0.3  # share of the run, as in torch.optim.lr_scheduler.OneCycleLR


@dataclass(frozen=True)
class TrainConfig:
    """One run's settings.

    A field whose option is None follows from the data set, the optimizer or the schedule, and is filled in on construction.

    :raises UsageError: for settings that contradict each other
    """

    # What is learned, and from what
    dataset: str = option("glyphs", "what to train on", choices=DATASETS)
    data_dir: Path = option(
        None,
        "folder of fashion-mnist: torchvision's layout or its four *-ubyte.gz files (default: ./data, or Debian's)",
    )
    download: bool = option(False, "let one process per node download fashion-mnist to --data-dir first")
    train_samples: int | None = option(None, "train on the first so many samples only", minimum=1)
    test_samples: int | None = option(None, "test on the first so many samples only", minimum=1)
    augment: bool = option(True, "shift (and, on fashion-mnist, mirror) the training images")
    model: str = option("fashion-cnn", "what to train", choices=MODELS)
    dropout: float = option(0.25, "dropout probability of fashion-cnn and mlp", minimum=0, below=1)

    # The optimization
    epochs: int = option(None, "passes over the training set (default: 12 on glyphs, 10 on fashion-mnist)", minimum=1)
    batch_size: int = option(144, "samples per optimizer step, over all ranks and micro-steps", minimum=1)
    micro_steps: int = option(1, "forward-backward passes per optimizer step (gradient accumulation)", minimum=1)
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
    sync_batchnorm: bool = option(False, "normalize by the statistics of the global batch instead of each rank's")
    compile: bool = option(False, "torch.compile the model (on the CPU this needs a C++ compiler)")
    channels_last: bool = option(True, "keep images as NHWC, which convolutions prefer")
    device: str = option("auto", "auto takes CUDA where there is any, unless --backend is gloo", choices=DEVICES)
    backend: str = option("auto", "auto takes nccl on CUDA and gloo on the CPU", choices=BACKENDS)
    threads: int = option(
        0, "CPU threads per rank; 0 shares the usable cores among the node's ranks", minimum=0, maximum=1024
    )
    timeout: float = option(600.0, "seconds that a collective waits for the other ranks", above=0, maximum=1e6)

    # Loading
    workers: int = option(0, "loader processes per rank; data in memory is fetched fastest without", minimum=0)
    persistent_workers: bool = option(True, "keep the loader processes from epoch to epoch")

    # What is left behind
    run_dir: Path = option(None, "directory of this run's results (default: runs/DATASET-MODEL)")
    overwrite: bool = option(False, "delete the run that is in the run directory")
    resume: bool = option(False, "continue the run that is in the run directory; on the CPU, bit for bit")
    keep_last: int = option(2, "checkpoints to keep", minimum=1)
    log_every: int = option(20, "steps between two records of loss and throughput", minimum=1)
    tensorboard: bool = option(False, "write TensorBoard files too (needs the extra 'tensorboard')")
    profile: bool = option(False, "record a few steps of each rank with torch.profiler, for Perfetto")

    def __post_init__(self) -> None:
        if self.dataset == "fashion-mnist":
            self._default("data_dir", Path("data") if self.download else fashion_mnist.default_folder())
        elif self.download:
            raise UsageError(f"--download is for fashion-mnist: {self.dataset} are rendered, not read")
        self._default("run_dir", Path("runs", f"{self.dataset}-{self.model}"))
        self._default("epochs", RECIPES[self.dataset]["epochs"])
        self._default("lr", LEARNING_RATES[self.optimizer])
        self._default("weight_decay", WEIGHT_DECAYS[self.optimizer])
        one_cycle = self.schedule == "one-cycle"
        self._default("warmup_epochs", ONE_CYCLE_WARMUP * self.epochs if one_cycle else min(1.0, self.epochs / 5))
        if self.warmup_epochs > self.epochs:
            raise UsageError(f"--warmup-epochs {self.warmup_epochs:g} is longer than --epochs {self.epochs}")

    def as_json(self) -> dict[str, Any]:
        """The settings as JSON has them."""
        settings = dataclasses.asdict(self)
        return {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}

    def _default(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)  # the one moment at which a frozen dataclass may still be completed

    @property
    def augmentation(self) -> Augmentation:
        """What the recipe of the data set does to training images; nothing with ``--no-augment``."""
        recipe = RECIPES[self.dataset]
        return Augmentation(recipe["shift"], recipe["flip"]) if self.augment else Augmentation()


def micro_batch_size(batch_size: int, world_size: int, micro_steps: int) -> int:
    """Samples that one rank takes per forward pass, so that all ranks and micro-steps together make the global batch.

    :raises UsageError: when the global batch does not divide, with the nearest that do
    """
    parts = world_size * micro_steps
    if batch_size % parts:
        below, above = batch_size // parts * parts, -(-batch_size // parts) * parts
        nearest = " or ".join(str(size) for size in (below, above) if size)
        raise UsageError(
            f"--batch-size {batch_size} does not divide over {world_size} ranks x {micro_steps} micro-steps: use {nearest}"
        )
    return batch_size // parts
