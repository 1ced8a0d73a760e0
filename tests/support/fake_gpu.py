"""GPUs for tests on the CPU.

:class:`FakeGpu` copies as late as CUDA may: a copy is queued, and runs when the host waits for an event that was recorded behind
it, and not before. So memory that is written to again too soon, or read too soon, shows in the result. :class:`TimedGPU` does
nothing but keep time and count memory. :func:`pretend_gpus` lets torch find devices, :func:`gloo_as_nccl` a backend for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

CUDA = torch.device("cuda", 0)


class _WithStreams:
    current: Any  # a FakeStream, or the name of one of the timed

    @contextlib.contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class FakeStream:
    """Its queue runs in order, up to an event that somebody waits for."""

    def __init__(self, gpu: FakeGpu, name: str) -> None:
        self.gpu, self.name = gpu, name
        self.queued: list[Callable[[], object]] = []

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self.gpu)
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        assert event.stream is not None
        self.gpu.log.append(f"{self.name} waits for {event.stream.name}")


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.stream: FakeStream | None = None
        self._behind: list[Callable[[], object]] = []

    def record(self, stream: FakeStream | None = None) -> None:
        self.stream = stream or self._gpu.current
        self._behind = list(self.stream.queued)

    def synchronize(self) -> None:
        assert self.stream is not None
        self._gpu.log.append(f"{threading.current_thread().name} waits for {self.stream.name}")
        for run in self._behind:
            if run in self.stream.queued:
                self.stream.queued.remove(run)
                run()


class FakeGpu(_WithStreams):
    """Replaces ``torch.cuda`` for a test.

    :ivar log: what was queued and waited for, in order
    :ivar ever_pinned: how often page-locked memory was asked for
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self._pinned: dict[int, int] = {}  # the address and the bytes of page-locked memory
        self.ever_pinned = 0
        self.current = FakeStream(self, "the computing stream")
        self._streams: list[FakeStream] = [self.current]
        for name, fake in {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "device": lambda device: contextlib.nullcontext(),
            "Stream": self._new_stream,
            "Event": lambda **settings: FakeEvent(self),
            "stream": self._on,
            "current_stream": lambda device=None: self.current,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(
            Tensor, "record_stream", lambda tensor, stream: self.log.append(f"in use on {stream.name}"), raising=False
        )
        for name in ("empty", "empty_like"):
            monkeypatch.setattr(torch, name, self._pinning(getattr(torch, name)))
        monkeypatch.setattr(Tensor, "copy_", self._queueing(Tensor.copy_))
        monkeypatch.setattr("common.data.on_device.send", self.send)

    def _pinning(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*arguments: Any, pin_memory: bool = False, **settings: Any) -> Tensor:
            memory = make(*arguments, **settings)
            if pin_memory:
                self._pinned[memory.data_ptr()] = memory.nbytes
                self.ever_pinned += 1
            return memory

        return made

    def _queueing(self, copy: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def copy_(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            if not non_blocking:
                return copy(into, source)
            self.log.append(f"copy on {self.current.name}")
            self.current.queued.append(lambda: copy(into, source))
            return into

        return copy_

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        """``common.data.on_device.send``: the copy has arbitrary content until it has run.

        Of page-locked memory it reads what lies there then, whichever tensor has it. Other memory goes through a copy that torch looks
        after.
        """
        self.log.append(f"copy on {self.current.name}")
        is_pinned = any(start <= tensor.data_ptr() < start + size for start, size in self._pinned.items())
        arrived, copy = torch.full_like(tensor, 77), None if is_pinned else tensor.clone()
        address, size = tensor.data_ptr(), tensor.nbytes

        def run() -> None:
            ctypes.memmove(arrived.data_ptr(), address if copy is None else copy.data_ptr(), size)

        self.current.queued.append(run)
        return arrived

    def finish(self) -> None:
        """Run what the host has not waited for."""
        for stream in self._streams:
            while stream.queued:
                stream.queued.pop(0)()

    def _new_stream(self, device: Any = None) -> FakeStream:
        self._streams.append(FakeStream(self, f"stream {len(self._streams)}"))
        return self._streams[-1]


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


class TimedGPU(_WithStreams):
    """Streams and events whose time is told. An event is complete as soon as the host waits for it.

    ``now_ms`` is the present time in each stream, by the stream's name. ``waits`` counts the times that the host waited. ``peak``
    is the most memory that tensors took, in bytes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms, self.waits, self.peak, self.current = {"default": 0.0}, 0, 0, "default"
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing
                self.at_ms: float | None = None

            def record(self, stream: str | None = None) -> None:
                self.at_ms = gpu.now_ms[stream or gpu.current]

            def synchronize(self) -> None:
                gpu.waits += 1

            def elapsed_time(self, other: Event) -> float:
                assert self.at_ms is not None and other.at_ms is not None
                return other.at_ms - self.at_ms

        for name, fake in {
            "Event": Event,
            "Stream": lambda device: "another",
            "stream": self._on,
            "current_stream": lambda device: gpu.current,
            "synchronize": lambda device: None,
            "max_memory_allocated": lambda device: gpu.peak,
            "reset_peak_memory_stats": lambda device: setattr(gpu, "peak", 0),
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int, uuids: str = "1" * 8) -> None:
    """Let torch count so many GPUs.

    :param uuids: a letter for each, which is its own name
    """

    def properties(device: torch.device) -> SimpleNamespace:
        uuid = uuids[torch.device(device).index or 0]
        return SimpleNamespace(name="NVIDIA H100", uuid=uuid, total_memory=80 * 10**9, major=9, minor=0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


NCCL_CREATORS = {"_create_nccl_process_group": "ProcessGroupNCCL", "_create_nccl2_process_group": "ProcessGroupNCCL2"}


def gloo_as_nccl(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let gloo take the place of NCCL; returns a list of the implementations that torch would have built, as it grows."""
    built: list[str] = []

    def creator(name: str) -> Callable[[Any, Any], Any]:
        def create(options: Any, _: Any) -> Any:
            built.append(name)
            return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)

        return create

    for function, name in NCCL_CREATORS.items():
        monkeypatch.setattr(distributed_c10d, function, creator(name))
    return built
