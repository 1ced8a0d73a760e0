"""torch's own ``DataLoader``, as all commands here make it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from common.resilience.loader_workers import poll_for_deaths, start_worker
from dataloading.loader.buffers import require_shared_memory

FLOAT_BYTES = 4
PREFETCH_FACTOR = 2  # DataLoader's own


def stock_loader(dataset: Any, workers: int, *, image_bytes: int = 0, **settings: Any) -> DataLoader[Any]:
    """A ``DataLoader``; that there are more workers than cores is no news, since it may be the question.

    :param image_bytes: what an image takes in a batch, if it is to be seen to that all on their way find room
    :param settings: its other arguments
    :raises UsageError: when they do not
    """
    on_their_way = workers * settings.get("prefetch_factor", PREFETCH_FACTOR) * settings.get("batch_size", 1)
    require_shared_memory(image_bytes * on_their_way)
    poll_for_deaths()
    with _expected_warning():
        return DataLoader(dataset, num_workers=workers, **{"worker_init_fn": start_worker, **settings})


def each(loader: Iterable[Any]) -> Iterator[Any]:
    """The loader's iterator, without that warning."""
    with _expected_warning():
        return iter(loader)


@contextlib.contextmanager
def _expected_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield
