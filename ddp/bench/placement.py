"""Where the ranks of a benchmark run: on the CPU, each on a GPU of its own, or several on one GPU."""

from __future__ import annotations

from dataclasses import dataclass

from common.command_line.cli import option
from common.distributed import DEVICES
from common.errors import UsageError
from common.gpu.devices import count_gpus, why_no_gpu
from common.machine import usable_cores

RANKS_ON_THE_CPU = 2


@dataclass(frozen=True)
class Placement:
    """So many ranks, on so many GPUs of this machine.

    :param gpus: 0 on the CPU; fewer than ``ranks`` where ranks share a GPU
    """

    ranks: int
    gpus: int

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda"``."""
        return "cuda" if self.gpus else "cpu"

    @property
    def backend(self) -> str:
        """NCCL wants a GPU for each rank. Gloo copies through the host, and so serves ranks that share one."""
        return "nccl" if 0 < self.ranks <= self.gpus else "gloo"

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        if not self.gpus:
            cores = usable_cores()
            return f"{ranks} on {cores} core{'s' * (cores > 1)}, {self.backend}"
        if self.ranks > self.gpus:
            return f"{ranks} that share {self.gpus} GPU{'s' * (self.gpus > 1)}, {self.backend}"
        return f"{ranks} on {self.ranks} GPU{'s' * (self.ranks > 1)}, {self.backend}"


def place_ranks(device: str, ranks: int | None, least: int = 1) -> Placement:
    """Choose the device, and the number of ranks if it is not given.

    :param device: one of :data:`common.distributed.DEVICES`; ``auto`` takes CUDA where each rank gets a GPU of its own
    :param ranks: one per GPU when None, or 2 on the CPU
    :param least: the fewest ranks with which there is something to measure
    :raises UsageError: for CUDA where there is no GPU
    """
    gpus = 0 if device == "cpu" else count_gpus()
    if device == "cuda" and not gpus:
        raise UsageError(f"--device cuda, but {why_no_gpu()}, or use --device cpu")
    if device == "auto" and gpus < (ranks or least):
        gpus = 0
    return Placement(ranks or max(least, gpus or RANKS_ON_THE_CPU), gpus)


@dataclass(frozen=True)
class PlacedConfig:
    """Settings of a command that starts its ranks. What is not given is filled in on construction, see :func:`place_ranks`."""

    LEAST_RANKS = 1  # with which there is something to measure

    ranks: int = option(
        None, "processes (default: one per GPU; on the CPU 2, each with one thread)", minimum=1, maximum=64
    )
    device: str = option("auto", "auto takes CUDA where there is a GPU for each rank", choices=DEVICES)

    def __post_init__(self) -> None:
        placement = self.placement
        object.__setattr__(self, "ranks", placement.ranks)
        object.__setattr__(self, "device", placement.device)

    @property
    def placement(self) -> Placement:
        """Where the ranks run."""
        return place_ranks(self.device, self.ranks, self.LEAST_RANKS)
