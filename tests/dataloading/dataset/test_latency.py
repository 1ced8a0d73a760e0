"""``dataloading.dataset.latency``: waits that belong to the name, around the median that was asked for."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np
import pytest

from dataloading.dataset.latency import SIGMA, DelayedStorage, delay_s
from dataloading.dataset.storage import BadFile, LocalFolder

NAMES = [f"Person_{i}/Person_{i}_0001.jpg" for i in range(4000)]


def test_the_waits_are_log_normal_around_the_median() -> None:
    waits = np.array([delay_s(20, name) for name in NAMES])
    assert statistics.median(waits) == pytest.approx(0.020, rel=0.03)
    assert np.log(waits).std() == pytest.approx(SIGMA, rel=0.05)
    assert np.quantile(waits, 0.95) == pytest.approx(0.020 * 1.64, rel=0.05)


def test_each_read_waits_its_time_and_nothing_else_does(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    place = LocalFolder(str(pictures))
    slow = DelayedStorage(place, 50)
    assert slow.root == place.root
    assert slow.names() == place.names()
    assert waits == []
    for name in slow.names():
        assert slow.read(name) == place.read(name)
    assert waits == [delay_s(50, name) for name in slow.names()]
    with pytest.raises(BadFile):
        slow.read("gone.jpg")
