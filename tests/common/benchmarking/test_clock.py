"""``common.benchmarking.clock``: when a rank's work was done, by the host's clock and by a GPU's events."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from common.benchmarking.clock import DeviceClock, HostClock, clock_of
from tests.support.fake_gpu import TimedGPU


def test_a_gpus_stamps_are_seconds_of_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of a GPU's events are seconds of the host's clock.

    Claim (ddp/README.md): on a GPU: a benchmark's ranks get a GPU each, over NCCL, or share one, over gloo; times are
    those of the GPU's streams.
    """
    gpu = TimedGPU(monkeypatch)
    clock = clock_of(torch.device("cuda", 0))
    assert isinstance(clock, DeviceClock)
    gpu.now_ms["default"] = 500.0
    before = time.perf_counter()
    clock.start()
    after = time.perf_counter()
    gpu.waits = 0
    stamps = []
    for _ in range(3):
        gpu.now_ms["default"] += 40.0
        stamps.append(clock.stamp())
    assert gpu.waits == 0  # to stamp is not to wait
    seconds = [clock.seconds(stamp) for stamp in stamps]
    assert gpu.waits == 3
    assert [b - a for a, b in itertools.pairwise(seconds)] == pytest.approx([0.04, 0.04])
    assert before + 0.04 <= seconds[0] <= after + 0.04


def test_the_cpus_stamps_are_the_hosts_clock() -> None:
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    clock.start()
    before, stamp, after = time.perf_counter(), clock.stamp(), time.perf_counter()
    assert before <= clock.seconds(stamp) <= after


@pytest.mark.gpu
def test_a_gpus_work_takes_time_after_the_call_has_returned() -> None:
    device = torch.device("cuda", 0)
    clock = clock_of(device)
    matrix = torch.randn(4096, 4096, device=device)
    matrix @ matrix
    clock.start()
    began = clock.stamp()
    for _ in range(50):
        matrix @ matrix
    returned, ended = time.perf_counter(), clock.stamp()
    assert clock.seconds(began) < clock.seconds(ended)
    assert clock.seconds(ended) > returned
