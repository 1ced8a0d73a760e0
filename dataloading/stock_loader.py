"""torch's own ``DataLoader``, as all commands here make it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from common.datasets import start_worker


def stock_loader(dataset: Any, workers: int, **settings: Any) -> DataLoader[Any]:
    """A ``DataLoader``; that there are more workers than cores is no news, since it may be the question.

    :param settings: its other arguments
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        return DataLoader(dataset, num_workers=workers, worker_init_fn=start_worker, **settings)


def each(loader: Iterable[Any]) -> Iterator[Any]:
    """The loader's iterator, without that warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        return iter(loader)
