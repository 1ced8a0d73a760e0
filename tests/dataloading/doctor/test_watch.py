"""A watched loader gives the same batches in the same order, and draws the same random numbers."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from dataloading.doctor import watch
from dataloading.doctor.measured import read
from dataloading.doctor.watch import fetching, sampling
from dataloading.doctor.watch.dataset import MANY, describe


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
    assert fetch.slowest[0] == (0.0, 7)


def test_a_class_of_a_notebook_is_in_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    cell: Any = type("Cell", (Noisy,), {"__module__": "__main__"})()
    cell.short, cell.long = list(range(MANY)), list(range(2 * MANY))
    facts = describe(DataLoader(Subset(cell, list(range(MANY)))))
    assert facts["lists"][0] == ("", "Cell", "long", "list")
    assert ("", "Subset", "indices", "list") in facts["lists"]


def test_nothing_is_left_of_a_watch(tmp_path: Path) -> None:
    before, files = signal.getsignal(signal.SIGUSR2), os.listdir("/proc/self/fd")
    watch.begin(str(tmp_path))
    list(DataLoader(Noisy()))
    watch.end()
    assert signal.getsignal(signal.SIGUSR2) is before and os.listdir("/proc/self/fd") == files
