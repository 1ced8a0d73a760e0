"""A watched loader gives the same batches in the same order, and draws the same random numbers."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dataloading.doctor import diagnose, watch
from dataloading.doctor.measured import read
from dataloading.doctor.watch import fetching, sampling


class Noisy(Dataset[tuple[Tensor, float, float]]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, float, float]:
        return torch.randn(3) + index, random.random(), float(np.random.rand())


class Stream(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        return (random.random() for _ in range(25))


class Whole(Noisy):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def digest(**settings: Any) -> list[Any]:
    """Two epochs of a loader that is made anew, and the state of the random numbers after them."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    loader: DataLoader[Any] = DataLoader(**settings)
    batches = [batch for _ in range(2) for batch in loader]
    parts = [
        np.asarray(part).tolist()
        for batch in batches
        for part in (batch if isinstance(batch, (list, tuple)) else [batch])
    ]
    return [*parts, torch.get_rng_state().tolist(), random.getstate(), np.random.random()]


LOADERS: dict[str, dict[str, Any]] = {
    "workers": {"dataset": Noisy(), "batch_size": 8, "shuffle": True, "num_workers": 2, "persistent_workers": True},
    "none": {"dataset": Noisy(), "batch_size": 8, "shuffle": True},
    "single samples": {"dataset": Noisy(), "batch_size": None, "shuffle": True, "num_workers": 1},
    "stream": {"dataset": Stream(), "batch_size": 4, "num_workers": 2},
    "whole batches": {"dataset": Whole(), "batch_size": 7, "drop_last": True, "num_workers": 1},
}


@pytest.mark.parametrize("name", LOADERS)
def test_batches_order_and_random_numbers_are_unchanged(name: str, tmp_path: Path) -> None:
    expected = digest(**LOADERS[name])
    watch.begin(str(tmp_path))
    try:
        assert digest(**LOADERS[name]) == expected
    finally:
        watch.end()
    (seen,) = read(tmp_path)
    assert seen.line.startswith(__file__)
    assert len(seen.all("batch")) == len(seen.of_workers("fetch")) and len(seen.all("end")) == 2


def test_threads_that_live_before_a_fork_are_noted(tmp_path: Path) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="uploader")
    thread.start()
    watch.begin(str(tmp_path))
    try:
        list(DataLoader(Noisy(), num_workers=1))
    finally:
        watch.end()
        done.set()
        thread.join()
    (seen,) = read(tmp_path)
    assert "uploader" in [name for name, _ in seen.all("threads")[0]["alive"]]


def test_a_sample_is_not_slow_where_other_programs_used_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that samples could not wake meanwhile either, and the sample did not compute."""
    late = iter([0.0, 60.0])
    monkeypatch.setattr(sampling.sampler, "late", lambda: next(late))
    fetch = fetching.Fetch()
    for _ in fetch.one_by_one([7]):
        time.sleep(0.02)
    assert fetch.samples == [(0.0, 7)]


class Slow(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, float, float]:
        return torch.tensor(float(sum(n * n for n in range(400_000)))), 0.0, 0.0


@pytest.mark.parametrize("workers", [0, 2])
def test_one_loader_of_a_program_is_diagnosed_twice_alike(workers: int) -> None:
    loader = DataLoader(Slow(), batch_size=10, num_workers=workers)
    for _ in range(2):
        report = diagnose(loader, trials=0)
        assert "seen: 6 batches" in report
        assert f"{Path(__file__).name}:" in report.splitlines()[0]
        assert "sum(n * n for n in range" in report
        assert ("slow-getitem" if workers else "too-few-workers") in report
