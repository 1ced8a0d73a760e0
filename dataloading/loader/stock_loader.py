"""torch's own ``DataLoader`` for the benchmarks: :func:`common.data.loaders.stock_loader` without a warning of many workers."""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.data import DataLoader

from common.data import loaders

FLOAT_BYTES = 4


class _DataLoader(DataLoader[Any]):
    def check_worker_number_rationality(self) -> None:
        """No warning of more workers than cores: a benchmark may try them."""


def worker_numbers(most: int, every_to: int) -> list[int]:
    """Numbers of workers to try: each up to ``every_to``, then powers of two, and ``most``."""
    return [n for n in range(most + 1) if n <= every_to or n == most or n & (n - 1) == 0]


stock_loader = functools.partial(loaders.stock_loader, loader=_DataLoader)
