"""The settings of ``ddp.bench allreduce``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.cli import option
from common.distributed.placement import Placement, place_ranks
from common.distributed.process_group import DEVICES
from common.errors import UsageError
from ddp.all_reduce import ALL_REDUCES

KI, MI = 1 << 10, 1 << 20
SIZES = (4, 64, KI, 4 * KI, 16 * KI, 64 * KI, 256 * KI, MI, 4 * MI, 16 * MI, 25 * MI, 100 * MI)
ELEMENT = 4  # bytes, of a float32
BACKEND, SHARED = "backend", "shared-memory"
BY_HAND = tuple(name for name in ALL_REDUCES if name not in (BACKEND, "hierarchical"))


@dataclass(frozen=True)
class AllReduceConfig:
    """Settings of ``ddp.bench allreduce``.

    :raises UsageError: for a size that is not a whole number of elements
    """

    ranks: int = option(
        None, "processes (default: one per GPU; on the CPU 2, each with one thread)", minimum=2, maximum=64
    )
    device: str = option("auto", "auto takes CUDA where there is a GPU for each rank", choices=DEVICES)
    sizes: tuple[int, ...] = option(SIZES, "sizes of the float32 tensors in bytes", minimum=ELEMENT)
    rounds: int = option(15, "measured rounds; in each, every algorithm takes one turn", minimum=2)
    output: Path = option(Path("runs/bench-allreduce"), "folder of the JSON and the figure")

    def __post_init__(self) -> None:
        for size in self.sizes:
            if size % ELEMENT:
                raise UsageError(f"--sizes {size} is no multiple of the {ELEMENT} bytes of a float32")
        if len(self.sizes) < 2:
            raise UsageError(f"--sizes {self.sizes[0]}: give two or more, which a line needs")
        placement = self.placement
        defaults = {"ranks": placement.ranks, "device": placement.device, "sizes": tuple(sorted(self.sizes))}
        for name, value in defaults.items():
            object.__setattr__(self, name, value)

    @property
    def placement(self) -> Placement:
        return place_ranks(self.device, self.ranks, least=2)

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The backend's own first, then those by hand, which sum tensors of the CPU."""
        return (BACKEND,) if self.placement.gpus else (BACKEND, *BY_HAND)


def size_name(size: int) -> str:
    """``4 B``, ``64 KiB``, ``25 MiB``."""
    for unit, name in ((MI, "MiB"), (KI, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"
