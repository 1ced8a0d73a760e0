"""What ``ddp.train`` can be told, checked once, on every rank alike, before anything is done."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common import fashion_mnist
from common.augmentation import Augmentation
from common.cli import UsageError, flag_of, option
from common.datasets import IN_MEMORY
from common.models import MODELS
from common.precision import PRECISIONS
from common.process_group import BACKENDS, DEVICES
from dataloading.decoders import DECODERS

DATASETS = (*IN_MEMORY, "lfw")
LOADERS = ("stock", "fast")
OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "cosine", "one-cycle")

# What a data set is trained with unless a flag says otherwise.
RECIPES: dict[str, dict[str, Any]] = {
    "glyphs": {"model": "fashion-cnn", "epochs": 12, "batch_size": 144, "shift": 3, "flip": False},
    "fashion-mnist": {"model": "fashion-cnn", "epochs": 10, "batch_size": 144, "shift": 1, "flip": True},
    "lfw": {"model": "resnet18", "epochs": 15, "batch_size": 48, "shift": 4, "flip": True},
}
# How images are had from files, unless a flag says otherwise; those in memory have no use for it.
FROM_FILES: dict[str, Any] = {"min_images_per_person": 40, "image_size": 64, "decoder": "pillow"}
LEARNING_RATES = {"sgd": 0.1, "adam": 0.002, "adamw": 0.002}
WEIGHT_DECAYS = {"sgd": 5e-4, "adam": 0.0, "adamw": 0.05}
ONE_CYCLE_WARMUP = 0.3  # share of the run, as in torch.optim.lr_scheduler.OneCycleLR


class Loading(NamedTuple):
    """How batches are brought to a rank: by which of :data:`LOADERS`, with how many workers, kept from epoch to epoch?"""

    loader: str = "stock"
    workers: int = 0
    persistent: bool = False


WITHOUT_WORKERS = Loading()


@dataclass(frozen=True)
class TrainConfig:
    """One run's settings.

    A field whose option is None follows from the data set, the optimizer or the schedule, and is filled in on construction.

    :raises UsageError: for settings that contradict each other
    """

    # What is learned, and from what
    dataset: str = option("glyphs", "what to train on; lfw is a folder of faces", choices=DATASETS)
    data_dir: str = option(
        None,
        "of fashion-mnist: torchvision's layout or its four *-ubyte.gz files (default: ./data, or Debian's); of lfw: "
        "a folder or URL with a folder of JPEGs for each person (default: faces drawn for the purpose)",
    )
    download: bool = option(False, "let one process per node download fashion-mnist to --data-dir first")
    train_samples: int | None = option(None, "train on the first so many samples only", minimum=1)
    test_samples: int | None = option(None, "test on the first so many samples only", minimum=1)
    min_images_per_person: int = option(
        None, "of lfw, take the people with so many images; a fifth of each is for testing (default: 40)", minimum=2
    )
    image_size: int = option(
        None, "height and width to which lfw's images are resized (default: 64)", minimum=8, maximum=1024
    )
    augment: bool = option(True, "shift (and, except for glyphs, mirror) the training images")
    model: str = option(None, "what to train (default: fashion-cnn; resnet18 on lfw)", choices=MODELS)
    dropout: float = option(0.25, "dropout probability of fashion-cnn and mlp", minimum=0, below=1)

    # The optimization
    epochs: int = option(
        None, "passes over the training set (default: 12 on glyphs, 10 on fashion-mnist, 15 on lfw)", minimum=1
    )
    batch_size: int = option(
        None, "samples per optimizer step, over all ranks and micro-steps; 48 on lfw (default: 144)", minimum=1
    )
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
    loader: str = option(
        None, "torch's DataLoader, or dataloading's own, for files (default: stock; fast on lfw)", choices=LOADERS
    )
    workers: int = option(
        None,
        "loader processes (or threads, of the fast one) per rank; on a CPU, they compete with training for its cores "
        "(default: 0, since data in memory is fetched fastest without; 1 on lfw)",
        minimum=0,
    )
    persistent_workers: bool = option(True, "keep the workers from epoch to epoch")
    decoder: str = option(None, "of lfw's JPEGs; the others are faster and extras (default: pillow)", choices=DECODERS)

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
            self._default("data_dir", "data" if self.download else str(fashion_mnist.default_folder()))
        elif self.download:
            raise UsageError(f"--download is for fashion-mnist: {self.dataset} has no such place on the internet")
        in_memory = self.dataset in IN_MEMORY
        for name, value in FROM_FILES.items():
            if in_memory and getattr(self, name) is not None:
                raise UsageError(f"{flag_of(name)} is for lfw: {self.dataset} has no files to choose from or decode")
            self._default(name, None if in_memory else value)
        self._default("loader", "stock" if in_memory else "fast")
        self._default("workers", 0 if in_memory else 1)
        if in_memory and self.loader == "fast":
            raise UsageError(f"--loader fast is for lfw: {self.dataset} lies in memory and needs no decoding")
        for name in ("model", "epochs", "batch_size"):
            self._default(name, RECIPES[self.dataset][name])
        self._default("run_dir", Path("runs", f"{self.dataset}-{self.model}"))
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

    @property
    def loading(self) -> Loading:
        return Loading(self.loader, self.workers, self.persistent_workers)


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
