"""torch's own ``DataLoader``, with what its workers need, as all commands here construct it."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from common.resilience.loader_workers import poll_for_deaths, start_worker


def stock_loader(dataset: Any, workers: int, **settings: Any) -> DataLoader[Any]:
    """Construct a ``DataLoader`` whose dead workers are found and whose stopped workers end quietly.

    :param workers: loader processes; 0 loads in the main process
    :param settings: other arguments of ``DataLoader``
    """
    poll_for_deaths()
    return DataLoader(dataset, num_workers=workers, **{"worker_init_fn": start_worker, **settings})
