"""A loader of a program is examined there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dataloading.doctor import diagnose, diagnosis


class Slow(Dataset[Tensor]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(sum(n * n for n in range(100_000))))


@pytest.mark.parametrize("workers", [0, 2])
def test_one_loader_of_a_program_is_diagnosed_twice_alike(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "usable_cores", lambda: 2)
    loader = DataLoader(Slow(), batch_size=10, num_workers=workers)
    for _ in range(2):
        report = diagnose(loader, seconds=120, trials=0)
        assert "seen: 6 batches" in report
        assert f"{Path(__file__).name}:" in report.splitlines()[0]
        assert "sum(n * n for n in range" in report
        assert ("slow-getitem" if workers else "too-few-workers") in report


def test_persistent_workers_of_a_fork_server_that_live_already_are_left_alone() -> None:
    """Other workers are watched, of a fork server that loads the watch."""
    method: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "forkserver"}
    loader: DataLoader[Any] = DataLoader(Slow(), batch_size=10, num_workers=1, **method)
    list(loader)
    iterator: Any = loader._iterator
    before = iterator._workers[0]
    report = diagnose(loader, seconds=120, trials=0)
    assert "worker 0: 6 batches" in report and "sum(n * n for n in range" in report
    list(loader)
    iterator = loader._iterator
    assert iterator._workers[0] is before and before.is_alive()
