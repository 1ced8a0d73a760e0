"""The settings of ``ddp.train``, checked once, on every rank alike, before anything is done."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.command_line.cli import flag_of, is_function_name, option
from common.data import DECODERS
from common.data.datasets import IN_MEMORY
from common.distributed import BACKENDS, DEVICES
from common.errors import UsageError
from common.models.build import LEAST_SAMPLES, MODELS, TEXT_MODEL, GPTSize, find_own, require_heads
from common.training.metrics import check_tensorboard
from common.training.precision import PRECISIONS
from common.training.recipes import LearningConfig
from ddp.all_reduce import ALL_REDUCES, SHARDABLE
from ddp.strategies import (
    ANY_ALL_REDUCE,
    BY_HAND,
    GRADIENT_PRECISIONS,
    IN_BUCKETS,
    SHARDED,
    STRATEGIES,
    Averaging,
)

DATASETS = (*IN_MEMORY, "sums", "lfw", "folder")
LOADERS = ("stock", "fast")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")
WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
AFTER_THE_WATCHDOG_S = 30.0

TEXT = "sums"

# The settings that only data sets of files have, with their defaults.
FROM_FILES: dict[str, dict[str, Any]] = {
    "lfw": {"min_images_per_person": 40, "image_size": 64, "decoder": "pillow"},
    "folder": {"image_size": 64},
}
TAKERS = {**FROM_FILES, "glyphs": {"image_size": None}}  # the data sets that take any of these
# Where a run's directory is and how this start was asked for. They change nothing in the run.
LAUNCH_SETTINGS = ("resume", "auto_resume", "overwrite", "run_dir", "interface")


@dataclass(frozen=True)
class TrainConfig(LearningConfig):
    """One run's settings: those that all trainers share, data sets of files, and what many processes add.

    :raises UsageError: for settings that contradict each other
    """

    # The model and its data
    dataset: str = option(
        None,
        "the data set: sums is text, lfw is a folder of faces, folder has a folder of images per class; or your own: a "
        "function load() in a module (default: glyphs; sums for gpt)",
        choices=DATASETS,
        or_function=True,
    )
    data_dir: str = option(
        None,
        "of fashion-mnist: torchvision's layout or its four *-ubyte.gz files (default: ./data, or Debian's); of lfw: "
        "a folder with a folder of JPEGs for each person (default: faces drawn for the purpose); of folder: "
        "DIR/CLASS/IMAGE, or DIR/train/CLASS/IMAGE and DIR/test/CLASS/IMAGE",
        per_node=True,
    )
    min_images_per_person: int = option(
        None, "of lfw, take the people with so many images; a fifth of each is for testing (default: 40)", minimum=2
    )
    image_size: int = option(
        None,
        "height and width to which images from files are resized (default: 64), or glyphs enlarged, with three channels: a "
        "multiple of 28 (default: as they are; 224 for resnet50)",
        minimum=8,
        maximum=1024,
    )
    model: str = option(
        None,
        "the model, or your own: a function build(shape, classes) in a module (default: fashion-cnn; resnet18 for files; gpt "
        "for text)",
        choices=(*MODELS, TEXT_MODEL),
        or_function=True,
    )
    width: int = option(
        None, "of gpt: numbers per character between its layers (default: 128)", minimum=1, maximum=65536
    )
    layers: int = option(None, "of gpt, each with 12 width² parameters (default: 4)", minimum=1, maximum=1024)

    # The optimization
    epochs: int = option(None, "passes over the training set (default: 12 on glyphs, 15 on files, else 10)", minimum=1)
    batch_size: int = option(
        None, "samples per optimizer step, over all ranks and micro-steps; 48 on files (default: 144)", minimum=1
    )
    grad_accumulation_steps: int = option(1, "forward-backward passes (micro-steps) per optimizer step", minimum=1)

    # How it is computed
    fast: bool = option(
        False,
        "take shared memory and bf16 where this machine has them: chooses --strategy, --all-reduce and --precision, where they are "
        "not given, and prints what and why",
    )
    strategy: str = option(
        None,
        "replicas, whose gradients are averaged by torch's DDP, by naive (an all-reduce per parameter) or by handwritten (in "
        "buckets); or shards: zero1 of the optimizer's state, zero2 of the gradients too, zero3 of the parameters too, by hand; "
        "fsdp2 is torch's fully_shard (default: torch)",
        choices=STRATEGIES,
    )
    precision: str = option(
        None,
        "bf16 and fp16 are automatic mixed precision; fp16 with GradScaler (default: fp32)",
        choices=PRECISIONS,
    )
    all_reduce: str = option(
        None,
        "how torch's DDP and handwritten sum their buckets over the ranks, and whose halves zero1, zero2 and zero3 use (default: "
        "backend; torch's DDP on CPUs of one host: shared-memory)",
        choices=ALL_REDUCES,
    )
    bucket_mib: float | None = option(
        None,
        "MiB of gradients that torch's DDP or handwritten sends at once (default: 25, and 1 for the first bucket)",
        above=0,
        maximum=1e6,
    )
    gradient_precision: str = option(
        "fp32",
        "in which torch's DDP or handwritten sends gradients: bf16 halves the bytes and rounds each gradient to 8 bits",
        choices=GRADIENT_PRECISIONS,
    )
    sync_batchnorm: bool = option(False, "normalize by the statistics of the global batch instead of each rank's")
    compile: str | None = option(
        None,
        "torch.compile the model, in this mode (on the CPU this needs a C++ compiler); without a value: default",
        choices=COMPILE_MODES,
        implied="default",
    )
    device: str = option(
        "auto", "auto takes CUDA where each rank of a host gets a GPU, unless --backend is gloo", choices=DEVICES
    )
    backend: str = option("auto", "auto takes nccl on CUDA and gloo on the CPU", choices=BACKENDS)
    interface: str | None = option(
        None,
        "the network interface that the other hosts can reach (default: the one that leads to MASTER_ADDR)",
        per_node=True,
    )
    threads: int = option(
        0, "CPU threads per rank; 0 shares the usable cores among the node's ranks", minimum=0, maximum=1024
    )
    timeout: float = option(
        600.0, "seconds without progress after which the ranks stop and name the missing one", above=0, maximum=1e6
    )

    # Loading
    loader: str = option(
        None, "torch's DataLoader, or dataloading's own, for files (default: stock; fast for files)", choices=LOADERS
    )
    workers: int | None = option(
        None,
        "loader processes (or threads, of the fast one) per rank; on a CPU, they compete with training for its cores "
        "(default: 0, since data in memory is fetched fastest without; for files 1, and on a GPU the rank's cores but one)",
        minimum=0,
    )
    persistent_workers: bool = option(True, "keep the stock loader's workers from epoch to epoch")
    decoder: str = option(None, "of lfw's JPEGs; the others are faster and extras (default: pillow)", choices=DECODERS)

    # The run directory
    run_dir: Path = option(None, "directory of this run's results (default: runs/DATASET-MODEL)", per_node=True)
    overwrite: bool = option(False, "delete the run that is in the run directory")
    resume: bool = option(False, "continue the run that is in the run directory; on the CPU, bit for bit")
    auto_resume: bool = option(False, "continue the run if there is one, else start it: for jobs that are requeued")
    checkpoint_every: str = option("10min", "steps (500) or minutes (10min) between checkpoints inside an epoch")
    async_checkpoint: bool = option(False, "write checkpoints in the background, while training goes on")
    keep_last: int = option(2, "checkpoints to keep, beside the one with the best accuracy", minimum=1)
    max_skipped_steps: int = option(
        10, "steps with a loss or gradient that is not finite that are skipped before the run stops", minimum=0
    )
    check_replicas_every: int | None = option(
        None, "steps between two comparisons of all ranks' parameters, bit by bit (default: never)", minimum=1
    )
    log_every: int = option(20, "steps between two records of loss and throughput", minimum=1)
    tensorboard: bool = option(False, "write TensorBoard files too (needs the extra 'tensorboard')")
    profile: bool = option(False, "record a few steps of each rank with torch.profiler, for Perfetto")

    def __post_init__(self) -> None:
        self._default("dataset", TEXT if self.model == TEXT_MODEL else "glyphs")
        super().__post_init__()
        self._check_text()
        if self.dataset == "folder" and not self.data_dir:
            raise UsageError("--dataset folder needs --data-dir DIR, a folder with a folder of images for each class")
        from_files = FROM_FILES.get(self.dataset, {})
        for name in FROM_FILES["lfw"]:
            if name not in TAKERS.get(self.dataset, {}) and getattr(self, name) is not None:
                takers = " and ".join(dataset for dataset, settings in TAKERS.items() if name in settings)
                reason = "has no files to choose from or decode" if not from_files else "does not take it"
                raise UsageError(f"{flag_of(name)} is for {takers}: {self.dataset} {reason}")
            self._default(name, from_files.get(name))
        self._default("loader", "fast" if from_files else "stock")
        self._default("workers", None if from_files else 0)
        if not from_files and self.loader == "fast":
            raise UsageError(f"--loader fast is for {' and '.join(FROM_FILES)}: {self.dataset} has no files to decode")
        self._check_strategy()
        if self.compile in WITH_CUDA_GRAPHS and self.grad_accumulation_steps > 1:
            raise UsageError(  # .grad may lie in memory that the next micro-step's graph overwrites (pytorch#169545)
                f"--compile {self.compile} uses CUDA graphs, which lose the gradients of earlier micro-steps: use --compile "
                f"default, or --grad-accumulation-steps 1 instead of {self.grad_accumulation_steps}"
            )
        if self.overwrite and (self.resume or self.auto_resume):
            flag = "--resume" if self.resume else "--auto-resume"
            raise UsageError(f"{flag} continues the run in its directory and --overwrite deletes it: give one of them")
        _ = self.checkpoint_interval  # which may be wrong
        self._default("run_dir", Path("runs", self.run_name))

    def _check_text(self) -> None:
        if (self.model == TEXT_MODEL) != (self.dataset == TEXT):
            raise UsageError(
                f"--model {self.model} does not learn --dataset {self.dataset}: {TEXT_MODEL} learns {TEXT}, which is text, and "
                "all others learn images"
            )
        for name, value in {"width": 128, "layers": 4}.items():
            if self.model != TEXT_MODEL and getattr(self, name) is not None:
                raise UsageError(f"{flag_of(name)} is for --model {TEXT_MODEL}, not for {self.model}")
            self._default(name, value if self.model == TEXT_MODEL else None)
        if self.model == TEXT_MODEL:
            require_heads(self.width)

    @property
    def model_size(self) -> GPTSize | None:
        """The size of gpt. If it is sharded, no rank ever holds all of it."""
        return GPTSize(self.width, self.layers, on_meta=self.is_sharded) if self.model == TEXT_MODEL else None

    def _check_strategy(self) -> None:
        if not self.fast:
            self._default("strategy", "torch")
            self._default("precision", "fp32")
        by_hand = self.strategy in BY_HAND
        if self.fast and (None in (self.strategy, self.precision) or (by_hand and self.all_reduce is None)):
            return  # ddp/fast.py chooses the rest, and then this is called again
        if self.all_reduce is not None and self.strategy not in ANY_ALL_REDUCE:
            raise UsageError(
                f"--all-reduce {self.all_reduce} is for --strategy {', '.join(ANY_ALL_REDUCE)}: leave it out with {self.strategy}"
            )
        self._default("all_reduce", "backend" if by_hand else None)
        self._check_buckets()
        if not self.is_sharded:
            return
        if by_hand and self.all_reduce not in SHARDABLE:
            raise UsageError(
                f"--all-reduce {self.all_reduce} has no reduce-scatter and all-gather for --strategy {self.strategy}: use "
                f"{', '.join(SHARDABLE)}"
            )
        # The hooks of shards break the compiler's graphs, every rank writes its own part of a checkpoint, and no two are alike.
        for name in ("compile", "async_checkpoint", "check_replicas_every"):
            if getattr(self, name):
                raise UsageError(f"{flag_of(name)} is for replicas: leave it out with --strategy {self.strategy}")

    def _check_buckets(self) -> None:
        given = {"bucket_mib": self.bucket_mib is not None, "gradient_precision": self.gradient_precision != "fp32"}
        for name in (name for name, is_given in given.items() if is_given):
            if self.strategy not in IN_BUCKETS:
                raise UsageError(
                    f"{flag_of(name)} {getattr(self, name)} is for --strategy {' and '.join(IN_BUCKETS)}: {self.strategy} "
                    "sends no buckets of gradients"
                )

    @property
    def collective_timeout(self) -> datetime.timedelta:
        """How long the backend waits for a rank. The watchdog, which names the rank that is missing, comes before it."""
        return datetime.timedelta(seconds=self.timeout + AFTER_THE_WATCHDOG_S)

    @property
    def averaging(self) -> Averaging:
        return Averaging(self.strategy, self.all_reduce, self.bucket_mib, self.gradient_precision)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has a part of the model instead of a replica."""
        return self.strategy in SHARDED

    @property
    def checkpoint_interval(self) -> tuple[int | None, float | None]:
        """Steps and seconds between two checkpoints; one of them is None.

        :raises UsageError: when ``--checkpoint-every`` is neither
        """
        number, unit = re.fullmatch(r"(\d+(?:\.\d+)?)(min)?|.*", self.checkpoint_every.strip()).groups()  # type: ignore[union-attr]
        if number is None or float(number) == 0 or ("." in number and unit is None):
            raise UsageError(
                f"--checkpoint-every {self.checkpoint_every} is neither steps nor minutes: use, say, 500 or 10min"
            )
        return (None, 60 * float(number)) if unit else (int(number), None)

    def check(self, world_size: int) -> None:
        """Check the settings that depend on the number of ranks and on this host.

        :raises UsageError: when the batch does not divide, is too small for the model, or TensorBoard or the function of an
            own model is missing
        """
        require_samples(self.model, self.batch_size, world_size, self.grad_accumulation_steps)
        if self.tensorboard:
            check_tensorboard()
        if is_function_name(self.model):
            find_own(self.model)  # before there is a run directory

    @property
    def less_memory(self) -> list[str]:
        """Flags that let a rank's device hold less: smaller batches, shorter numbers, shards."""
        more_steps = f"more than --grad-accumulation-steps {self.grad_accumulation_steps}"
        shards = [] if self.is_sharded else ["--strategy fsdp2 on more ranks"]
        return [more_steps, *super().less_memory, *shards]


def micro_batch_size(batch_size: int, world_size: int, grad_accumulation_steps: int) -> int:
    """Samples that one rank takes per forward pass, so that all ranks and micro-steps together make the global batch.

    :raises UsageError: when the global batch does not divide, with the nearest that do
    """
    parts = world_size * grad_accumulation_steps
    if batch_size % parts:
        below, above = batch_size // parts * parts, -(-batch_size // parts) * parts
        nearest = " or ".join(str(size) for size in (below, above) if size)
        raise UsageError(
            f"--batch-size {batch_size} does not divide over {world_size} ranks x {grad_accumulation_steps} micro-steps: "
            f"use {nearest}"
        )
    return batch_size // parts


def require_samples(model: str, batch_size: int, world_size: int, grad_accumulation_steps: int = 1) -> None:
    """:raises UsageError: when the global batch does not divide, or leaves too few samples per forward pass for BatchNorm"""
    if micro_batch_size(batch_size, world_size, grad_accumulation_steps) < LEAST_SAMPLES.get(model, 1):
        raise UsageError(f"{model} cannot normalize a single sample per rank and micro-step: use a larger --batch-size")
