"""What ``ddp.bench allreduce`` can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from common.cli import option
from common.distributed.placement import Placement, place_ranks
from common.distributed.process_group import DEVICES
from common.errors import UsageError
from ddp.all_reduce import ALL_REDUCES

KI, MI = 1 << 10, 1 << 20
SIZES = (4, 64, KI, 4 * KI, 16 * KI, 64 * KI, 256 * KI, MI, 4 * MI, 16 * MI, 25 * MI, 100 * MI)
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
BACKEND, SHARED, HIERARCHICAL = "backend", "shared-memory", "hierarchical"
BY_HAND = tuple(name for name in ALL_REDUCES if name != BACKEND)


@dataclass(frozen=True)
class AllReduceConfig:
    """Settings of ``ddp.bench allreduce``.

    :raises UsageError: for a size that is not a whole number of elements, a number of ranks that hosts do not divide, or an
        algorithm by hand on a GPU
    """

    ranks: int = option(
        None, "processes (default: one per GPU; on the CPU 2, each with one thread)", minimum=2, maximum=64
    )
    device: str = option(
        "auto", "auto takes CUDA where there is a GPU for each rank, unless algorithms are named", choices=DEVICES
    )
    algorithms: tuple[str, ...] = option(
        None,
        "algorithms to compare with the backend's own (default: all on the CPU, hierarchical only with --hosts; none on GPUs)",
        choices=BY_HAND,
    )
    hosts: int = option(
        1, "simulated hosts, with equally many ranks each, for hierarchical; more than 1 adds it", minimum=1
    )
    sizes: tuple[int, ...] = option(SIZES, "sizes of the tensors in bytes", minimum=2)
    dtype: str = option("float32", "element type of the tensors", choices=tuple(DTYPES))
    rounds: int = option(15, "measured rounds; in each, every algorithm takes one turn", minimum=2)
    output: Path = option(Path("runs/bench-allreduce"), "folder of the JSON and the figure")

    def __post_init__(self) -> None:
        if self.device == "auto" and (self.algorithms or self.hosts > 1):
            object.__setattr__(self, "device", "cpu")
        placement = self.placement
        if placement.gpus and (self.algorithms or self.hosts > 1):
            raise UsageError("--algorithms and --hosts are for tensors of the CPU: leave them out, or --device cuda")
        # On one host, hierarchical is shared memory.
        algorithms = () if placement.gpus else tuple(name for name in BY_HAND if name != HIERARCHICAL)
        defaults = {"ranks": placement.ranks, "device": placement.device, "algorithms": self.algorithms or algorithms}
        for name, value in defaults.items():
            object.__setattr__(self, name, value)
        element = DTYPES[self.dtype].itemsize
        for size in self.sizes:
            if size % element:
                raise UsageError(f"--sizes {size} is no multiple of the {element} bytes of a {self.dtype}")
        if len(self.sizes) < 2:
            raise UsageError(f"--sizes {self.sizes[0]}: give two or more, which a line needs")
        if self.ranks % self.hosts:
            raise UsageError(f"--hosts {self.hosts} does not divide --ranks {self.ranks}")
        object.__setattr__(self, "sizes", tuple(sorted(self.sizes)))
        if self.hosts > 1 and HIERARCHICAL not in self.algorithms:
            object.__setattr__(self, "algorithms", (*self.algorithms, HIERARCHICAL))

    @property
    def placement(self) -> Placement:
        return place_ranks(self.device, self.ranks, least=2)


def size_name(size: int) -> str:
    """``4 B``, ``64 KiB``, ``25 MiB``."""
    for unit, name in ((MI, "MiB"), (KI, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"
