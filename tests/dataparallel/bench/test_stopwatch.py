"""Where the time of a step goes."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from dataparallel.bench.stopwatch import Stopwatch

CPU = [torch.device("cpu")]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the stopwatch sees; a test sets it."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_an_inner_block_s_time_is_its_own(clock: list[float]) -> None:
    watch = Stopwatch(CPU)
    with watch("backward"):
        clock[0] += 1
        with watch("reduce"):
            clock[0] += 10
        clock[0] += 100
    clock[0] += 1000
    with watch("optimizer"):
        clock[0] += 5
    assert watch.take() == {"backward": 101, "reduce": 10, "optimizer": 5}
    assert watch.take() == {}


def test_the_inner_block_may_be_in_another_thread(clock: list[float]) -> None:
    watch = Stopwatch(CPU)

    def reduce() -> None:
        with watch("reduce"):
            clock[0] += 10

    with watch("backward"):
        clock[0] += 1
        thread = threading.Thread(target=reduce)
        thread.start()
        thread.join()
    assert watch.take() == {"backward": 1, "reduce": 10}
