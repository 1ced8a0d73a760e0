"""Clocks of a rank's work: the host's, and a GPU's, whose work runs behind the host's calls.

A *stamp* marks the present point of the work, and its time is read later. On the CPU that is ``time.perf_counter``, which on
Linux is CLOCK_MONOTONIC: all processes of a machine share it. On a GPU a stamp is a CUDA event in the current stream: to
read the host's clock there would tell when work was queued, and not when it was done.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class HostClock:
    """The clock of work on the CPU, where a call returns when its work is done."""

    def start(self) -> None:
        """Begin anew. Earlier stamps can no longer be read."""

    def stamp(self) -> Any:
        """The present point of this rank's work. The host does not wait for it."""
        return time.perf_counter()

    def seconds(self, stamp: Any) -> float:
        """When the work reached it, in seconds of ``time.perf_counter``. The host waits until it has."""
        return float(stamp)


class DeviceClock(HostClock):
    """The clock of work on a GPU.

    Events tell the time between two of them, in milliseconds of 32 bits. So their seconds count from an event for which the
    host has waited, and that should not be minutes ago: after 100 s a millisecond is told to 8 microseconds.

    :param device: its current stream, in the thread that calls, is stamped
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origin, self._began = torch.cuda.Event(enable_timing=True), 0.0

    def start(self) -> None:
        torch.cuda.synchronize(self._device)
        self._origin = self.stamp()
        self._origin.synchronize()
        self._began = time.perf_counter()

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, stamp: torch.cuda.Event) -> float:
        stamp.synchronize()
        return self._began + 1e-3 * float(self._origin.elapsed_time(stamp))


def clock_of(device: torch.device) -> HostClock:
    """The clock of this device's work."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()
