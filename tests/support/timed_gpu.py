"""A GPU that does nothing but keep time: what the code says to it can be tested without one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch


class TimedGPU:
    """Streams and events whose time is told. An event is complete as soon as the host waits for it.

    ``now_ms`` is the present time in each stream, by the stream's name. ``waits`` counts the times that the host waited.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms, self.waits, self.current = {"default": 0.0}, 0, "default"
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing
                self.at_ms: float | None = None

            def record(self, stream: str) -> None:
                self.at_ms = gpu.now_ms[stream]

            def synchronize(self) -> None:
                gpu.waits += 1

            def elapsed_time(self, other: Event) -> float:
                assert self.at_ms is not None and other.at_ms is not None
                return other.at_ms - self.at_ms

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: "another")
        monkeypatch.setattr(torch.cuda, "stream", self._within)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu.current)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    @contextlib.contextmanager
    def _within(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let torch count so many GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    properties = SimpleNamespace(name="a GPU", uuid="1", total_memory=80 * 10**9, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
