"""The devices that one process drives: GPUs, or the same CPU several times.

A CPU "device" is a thread with a share of the cores. Results are those of the plain module. So the whole mechanism can be
tested and measured without GPUs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from common.errors import UsageError
from common.gpu.devices import count_gpus
from common.machine import usable_cores

MOST_CPU_DEVICES = 4  # of "auto": enough to see how it scales


def parse_devices(text: str) -> tuple[torch.device, ...]:
    """The devices of ``--devices``: ``cuda:0,cuda:1``, ``cpu,cpu,cpu``, or ``auto``.

    ``auto`` takes all GPUs where there are several, and otherwise as many CPU devices as there are usable cores, at least two
    and at most four.

    :raises UsageError: for a missing device, or devices of two kinds
    """
    if text == "auto":
        gpus = count_gpus()
        if gpus > 1:
            return tuple(torch.device("cuda", number) for number in range(gpus))
        return (torch.device("cpu"),) * min(MOST_CPU_DEVICES, max(2, usable_cores()))
    try:
        devices = check_devices([name.strip() for name in text.split(",")])
        if devices[0].type == "cuda" and len(set(devices)) < len(devices):
            raise ValueError("a GPU is named twice")
    except ValueError as error:
        raise UsageError(f"--devices {text}: {error}") from error
    return devices


def check_devices(devices: Sequence[torch.device | str | int]) -> tuple[torch.device, ...]:
    """Check that all devices exist and are of one kind.

    :param devices: as ``torch.device`` takes them; an integer is a GPU's number
    :raises ValueError: for an empty list, an unknown or missing device, or two kinds
    """
    checked = []
    for name in devices:
        try:
            device = torch.device(f"cuda:{name}" if isinstance(name, int) else name)
        except (RuntimeError, TypeError):
            raise ValueError(f"{name!r} is no device: give cpu or, for a GPU, cuda:0") from None
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name!r} is neither a CPU nor a CUDA device")
        checked.append(torch.device("cpu") if device.type == "cpu" else torch.device("cuda", device.index or 0))
    if not checked:
        raise ValueError("no devices: give at least one")
    if len({device.type for device in checked}) > 1:
        raise ValueError("some are CPU and some CUDA devices: give devices of one kind")
    gpus = count_gpus() if checked[0].type == "cuda" else 0
    missing = [device for device in checked if device.type == "cuda" and device.index >= gpus]
    if missing:
        raise ValueError(f"{missing[0]} is not there: this machine has {gpus or 'no'} usable GPU{'s' * (gpus != 1)}")
    return tuple(checked)


def current_streams(devices: Sequence[torch.device]) -> list[torch.cuda.Stream | None]:
    """The calling thread's current stream on each GPU; None for a CPU device."""
    return [torch.cuda.current_stream(device) if device.type == "cuda" else None for device in devices]


def on_stream(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Make this stream, and its GPU, the calling thread's current ones within the block; None changes nothing."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
