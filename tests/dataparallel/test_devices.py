"""dataparallel/devices.py: the default devices, devices by name, and errors for others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from common.errors import UsageError
from dataparallel import devices
from dataparallel.devices import check_devices, parse_devices

CPU = torch.device("cpu")


def gpu(number: int) -> torch.device:
    return torch.device("cuda", number)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Simulates a number of GPUs and of usable cores."""

    def simulate(gpus: int, cores: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(devices, "usable_cores", lambda: cores)

    return simulate


@pytest.mark.parametrize(
    ("gpus", "cores", "expected"),
    [
        (0, 1, [CPU] * 2),
        (0, 64, [CPU] * 4),
        (1, 64, [CPU] * 4),
        (5, 1, [gpu(number) for number in range(5)]),
    ],
)
def test_auto_takes_several_gpus_or_some_cores(
    machine: Callable[[int, int], None], gpus: int, cores: int, expected: list[torch.device]
) -> None:
    machine(gpus, cores)
    assert list(parse_devices("auto")) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu,cpu, cpu", [CPU] * 3),
        ("cpu:0,cpu:1", [CPU] * 2),
        ("cuda", [gpu(0)]),
    ],
)
def test_devices_by_name(machine: Callable[[int, int], None], text: str, expected: list[torch.device]) -> None:
    machine(2, 2)
    assert list(parse_devices(text)) == expected


@pytest.mark.parametrize(
    ("gpus", "text", "message"),
    [
        (0, "", "'' is no device: give cpu or, for a GPU, cuda:0"),
        (0, "tpu,tpu", "'tpu' is no device: give cpu or, for a GPU, cuda:0"),
        (0, "meta", "'meta' is neither a CPU nor a CUDA device"),
        (0, "cuda:0", "cuda:0 is not there: this machine has no usable GPUs"),
        (2, "cuda:0,cuda:2", "cuda:2 is not there: this machine has 2 usable GPUs"),
        (2, "cuda,cuda:0", "a GPU is named twice"),
        (2, "cpu,cuda:0", "some are CPU and some CUDA devices: give devices of one kind"),
    ],
)
def test_mistakes_are_one_line_that_names_the_flag(
    machine: Callable[[int, int], None], gpus: int, text: str, message: str
) -> None:
    machine(gpus, 2)
    with pytest.raises(UsageError) as caught:
        parse_devices(text)
    assert str(caught.value) == f"--devices {text}: {message}"


def test_numbers_and_torch_devices_are_devices_too(machine: Callable[[int, int], None]) -> None:
    machine(3, 2)
    assert check_devices([2, "cuda:1", gpu(0), torch.device("cuda")]) == (gpu(2), gpu(1), gpu(0), gpu(0))
    assert check_devices(["cpu", CPU, torch.device("cpu", 3)]) == (CPU, CPU, CPU)
    with pytest.raises(ValueError, match="no devices: give at least one"):
        check_devices([])
    with pytest.raises(ValueError, match="-1 is no device"):
        check_devices([-1])
    with pytest.raises(ValueError, match="None is no device"):
        check_devices([None])  # type: ignore[list-item]
