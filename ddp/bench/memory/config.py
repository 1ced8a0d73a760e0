"""What ``ddp.bench memory`` can be told, and the formulas that it compares with."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from common.cli import option
from common.errors import UsageError
from common.training.models import require_heads

PARTS = ("parameters", "gradients", "optimizer state")
UNITS = {"MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class MemoryConfig:
    """Settings of ``ddp.bench memory``.

    :raises UsageError: for a limit that is no size, and for a width that heads do not divide
    """

    width: int = option(256, "of the transformer", minimum=64)
    layers: int = option(8, "its blocks, of 12 width² parameters each", minimum=1)
    sequences: int = option(1, "of each rank in a step", minimum=1)
    length: int = option(64, "tokens of a sequence", minimum=1)
    ranks: tuple[str, ...] = option(("2", "3", "4"), "numbers of ranks", choices=("1", "2", "3", "4", "6", "8"))
    precision: str = option(
        "fp32",
        "bf16: compute and send in bfloat16, optimize in float32; replicas stay in fp32",
        choices=("fp32", "bf16"),
    )
    limit: str | None = option(None, "memory of a rank, such as 256MiB: find the largest model that trains within it")
    output: Path = option(Path("runs/bench-memory"), "folder of the JSON and the figure")

    def __post_init__(self) -> None:
        require_heads(self.width)
        _ = self.limit_bytes  # which may be wrong

    @property
    def low_precision(self) -> bool:
        """Whether parameters are gathered, used and reduced in bfloat16."""
        return self.precision == "bf16"

    @property
    def limit_bytes(self) -> int:
        """``--limit`` in bytes; 0 without one.

        :raises UsageError: when it is no size
        """
        if self.limit is None:
            return 0
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(MiB|GiB)", self.limit.strip())
        if found is None or not float(found[1]):
            raise UsageError(f"--limit {self.limit} is no size: use, say, 256MiB or 1GiB")
        return int(float(found[1]) * UNITS[found[2]])


def formula(stage: int | None, ranks: int, precision: str) -> dict[str, float]:
    """Bytes of each of :data:`PARTS` per parameter, see ddp/bench/memory/__init__.py.

    :param stage: 0 for replicas, None for ``fully_shard``, which is stage 3
    """
    n, low = ranks, 2.0 if precision == "bf16" else 4.0
    if stage is None or stage == 3:
        return dict(zip(PARTS, (4 / n, 4 / n, 8 / n), strict=True))
    if stage == 0:
        return dict(zip(PARTS, (4.0, 4.0, 8.0), strict=True))
    # Slices of their own: of the values, where they have another dtype; of the gradients, too, or at stage 2 alone.
    apart = 4 / n if low == 2 else 0.0
    gradients = low + apart if stage == 1 else 4 / n
    return dict(zip(PARTS, (low + apart, gradients, 8 / n), strict=True))
