"""common/gpu/devices.py: how many GPUs are usable, and what is said where a driver does not let them be."""

from __future__ import annotations

import warnings

import pytest
import torch

from common.distributed.dist_env import find_dist_env
from common.errors import UsageError
from common.gpu.devices import count_gpus

# In torch's words (c10/cuda/CUDAFunctions.cpp).
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading and installing "
    "a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: https://pytorch.org to install a "
    "PyTorch version that has been compiled with your version of the CUDA driver."
)
LINE = (
    r"no CUDA device is usable here \(The NVIDIA driver on your system is too old \(found version 11040\)\): update the driver, or "
    rf"install a torch that is built for an older CUDA than {torch.version.cuda}"
)


@pytest.fixture
def an_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch finds no device, warns of the driver when it first looks for one, and raises the same when CUDA is used."""
    told: list[bool] = []

    def is_available() -> bool:
        if not told:
            told.append(True)
            warnings.warn(
                f"CUDA initialization: {TOO_OLD} (Triggered internally at CUDAFunctions.cpp:109.)", stacklevel=1
            )
        return False

    def init() -> None:
        raise RuntimeError(TOO_OLD)

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "init", init)


@pytest.mark.usefixtures("an_old_driver")
def test_a_driver_that_is_too_old_is_one_line_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    for flags in ({"device": "cuda"}, {"backend": "nccl"}):
        with pytest.raises(UsageError, match=f"^--{next(iter(flags))} .*{LINE}, or use --"):
            find_dist_env(**flags, environment={})
    caplog.clear()


@pytest.mark.usefixtures("an_old_driver")
@pytest.mark.parametrize(("local_rank", "times"), [(None, 1), ("0", 1), ("1", 0)])
def test_and_where_any_device_will_do_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, local_rank: str | None, times: int
) -> None:
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert [find_dist_env(environment={}).device.type for _ in range(2)] == ["cpu"] * 2
    assert caplog.messages == [LINE.replace("\\", "")] * times


def test_no_word_where_there_is_no_driver(caplog: pytest.LogCaptureFixture) -> None:
    assert count_gpus() == 0
    assert not caplog.messages
