"""The settings of ``ddp.timeline``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.cli import flag_of, option
from common.distributed import DEVICES
from common.distributed.placement import PlacedConfig
from common.errors import UsageError
from common.training.models import MODELS
from ddp.all_reduce import ALL_REDUCES
from ddp.config import require_samples
from ddp.strategies import STAGES, require_shardable

REPLICAS = "handwritten"

OF_REPLICAS = ("model", "bucket_mib")  # flags that the sharded strategies do not have


@dataclass(frozen=True)
class StepTimelineConfig(PlacedConfig):
    """Settings of ``ddp.timeline``.

    :raises UsageError: for a global batch that does not divide over the ranks, or leaves a rank too few samples, for a flag
        that the strategy does not have, and for what is not recorded on GPUs
    """

    strategy: str = option(
        REPLICAS,
        "replicas of the DDP written by hand; or shards, also by hand: zero1 of the optimizer's state, zero2 of the gradients "
        "too, zero3 of the parameters too",
        choices=(REPLICAS, *STAGES),
    )
    model: str = option(
        None, "the model of which replicas are trained, on random images (default: mlp)", choices=MODELS
    )
    batch_size: int = option(
        None,
        "samples per step, over all ranks: images, or sequences with a sharded strategy (default: 144, or 12)",
        minimum=1,
        maximum=12_000,
    )
    device: str = option(
        "auto",
        "auto takes CUDA where there is a GPU for each rank; shards and all-reduces by hand are recorded on the CPU",
        choices=DEVICES,
    )
    all_reduce: str = option(
        "backend", "algorithm that sums the buckets over the ranks, or whose halves the shards use", choices=ALL_REDUCES
    )
    bucket_mib: float | None = option(None, "MiB of a bucket (default: 25, and 1 for the first)", above=0)
    steps: int = option(20, "recorded steps; the one of median duration is drawn", minimum=2)
    output: Path = option(Path("runs/ddp-timeline"), "folder of the picture, the trace and the recorded moments")

    def __post_init__(self) -> None:
        for name in OF_REPLICAS if self.stage else ():
            if (value := getattr(self, name)) is not None:
                raise UsageError(
                    f"{flag_of(name)} {value} is for --strategy {REPLICAS}: leave it out with --strategy {self.strategy}"
                )
        of_the_cpu = self.stage > 0 or self.all_reduce != "backend"
        if self.device == "auto" and of_the_cpu:
            object.__setattr__(self, "device", "cpu")
        super().__post_init__()
        if self.device == "cuda" and (of_the_cpu or self.placement.backend != "nccl"):
            raise UsageError(
                f"--device cuda records --strategy {REPLICAS} with --all-reduce backend, and one rank on each of {self.placement.gpus} "
                "usable GPUs: use --device cpu for all else"
            )
        defaults = {"batch_size": 12} if self.stage else {"batch_size": 144, "model": "mlp"}
        for name, default in defaults.items():
            object.__setattr__(self, name, getattr(self, name) or default)
        require_samples(self.model, self.batch_size, self.ranks)
        if self.stage:
            require_shardable(self.all_reduce, self.strategy)

    @property
    def summed_by(self) -> str:
        """The name of what sums: the backend's, or that of the algorithm by hand."""
        return self.placement.backend if self.all_reduce == "backend" else self.all_reduce

    @property
    def stage(self) -> int:
        """The stage of sharding: 1, 2 or 3; 0 for replicas."""
        return STAGES.get(self.strategy, 0)
