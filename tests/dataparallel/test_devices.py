"""dataparallel/devices.py: the default devices, devices by name, and errors for others."""

from __future__ import annotations

import pytest
import torch

from common.errors import UsageError
from dataparallel import devices
from dataparallel.devices import check_devices, parse_devices
from tests.support.fake_gpu import pretend_gpus

CPU = torch.device("cpu")
GPUS = [torch.device("cuda", number) for number in range(5)]


@pytest.mark.parametrize(
    ("gpus", "cores", "expected"), [(0, 1, [CPU] * 2), (0, 64, [CPU] * 4), (1, 64, [CPU] * 4), (5, 1, GPUS)]
)
def test_auto_takes_several_gpus_or_some_cores(
    monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, expected: list[torch.device]
) -> None:
    pretend_gpus(monkeypatch, gpus)
    monkeypatch.setattr(devices, "usable_cores", lambda: cores)
    assert list(parse_devices("auto")) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("cpu,cpu, cpu", [CPU] * 3), ("cpu:0,cpu:1", [CPU] * 2), ("cuda", GPUS[:1])]
)
def test_devices_by_name(monkeypatch: pytest.MonkeyPatch, text: str, expected: list[torch.device]) -> None:
    pretend_gpus(monkeypatch, 2)
    assert list(parse_devices(text)) == expected


@pytest.mark.parametrize(
    ("gpus", "text", "message"),
    [
        (0, "", "'' is no device: give cpu or, for a GPU, cuda:0"),
        (0, "meta", "'meta' is neither a CPU nor a CUDA device"),
        (0, "cuda:0", "cuda:0 is not there: this machine has no usable GPUs"),
        (2, "cuda:0,cuda:2", "cuda:2 is not there: this machine has 2 usable GPUs"),
        (2, "cuda,cuda:0", "a GPU is named twice"),
        (2, "cpu,cuda:0", "some are CPU and some CUDA devices: give devices of one kind"),
    ],
)
def test_mistakes_are_one_line_that_names_the_flag(
    monkeypatch: pytest.MonkeyPatch, gpus: int, text: str, message: str
) -> None:
    pretend_gpus(monkeypatch, gpus)
    with pytest.raises(UsageError) as caught:
        parse_devices(text)
    assert str(caught.value) == f"--devices {text}: {message}"


def test_numbers_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 3)
    assert check_devices([2, GPUS[0]]) == (GPUS[2], GPUS[0])
    for wrong in ([], [-1]):
        with pytest.raises(ValueError, match="no device"):
            check_devices(wrong)
