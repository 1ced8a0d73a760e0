"""tests/support/gpus.py: tests that are marked gpu see the machine's GPUs, and no others do, whatever their order."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from common.distributed.dist_env import find_dist_env
from common.distributed.worker_group import WorkerGroup
from common.reporting.machine import describe_machine
from tests.common.distributed.worker_group_functions import Service
from tests.support.launch import clean_environment, run_ranks


def visible() -> str | None:
    """What a process that uses CUDA would read."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


# A module of tests on a machine with two GPUs. Each test sees what it should, and so does what it starts.
MODULE = """
import os, subprocess, sys
import pytest, torch

def seen():
    child = subprocess.run([sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"], capture_output=True, text=True)
    counts = {torch.cuda.device_count(), torch.accelerator.device_count()}
    assert {torch.cuda.is_available(), torch.accelerator.is_available()} == {bool(max(counts))}
    return counts, child.stdout.strip()

@pytest.fixture(scope="module")
def of_the_module():
    return seen()

def test_plain(of_the_module):
    assert seen() == of_the_module == ({0}, "")

@pytest.mark.gpu
def test_gpu():
    assert seen() == ({2}, "4,7")

def test_plain_again(monkeypatch):
    assert seen() == ({0}, "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)  # as the tests do that pretend to have some
    assert torch.cuda.device_count() == 8
"""


def on_a_machine_with_two_gpus(folder: Path, order: list[str]) -> int:
    """Pytest's exit status. torch has counted the devices before, and will not do so again."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "4,7"
    (folder / "test_module.py").write_text(MODULE)
    with (
        mock.patch.object(torch.cuda, "_cached_device_count", 2),
        mock.patch.object(torch._C, "_cuda_getDeviceCount", return_value=2),
        mock.patch.object(torch.cuda, "_is_compiled", return_value=True),
    ):
        names = [f"{folder}/test_module.py::{name}" for name in order]
        return pytest.main(["-q", "-p", "tests.support.gpus", "-p", "no:cacheprovider", f"--rootdir={folder}", *names])


@pytest.mark.parametrize(
    "order", [["test_plain", "test_gpu", "test_plain_again"], ["test_gpu", "test_plain_again", "test_plain"]]
)
def test_only_tests_with_the_mark_see_gpus(tmp_path: Path, order: list[str]) -> None:
    assert run_ranks(on_a_machine_with_two_gpus, 1, tmp_path, order, fresh=True) == [0]


def test_this_test_and_what_it_starts_see_none() -> None:
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
    assert (find_dist_env(environment={}).backend, describe_machine()["gpus"]) == ("gloo", [])
    assert visible() == clean_environment()["CUDA_VISIBLE_DEVICES"] == ""
    assert run_ranks(visible, 2) == ["", ""]


@pytest.mark.parametrize("devices", ["3,5", None])
def test_ranks_see_what_a_test_with_the_mark_sees(monkeypatch: pytest.MonkeyPatch, devices: str | None) -> None:
    """Though they are forked from a server that a test without it has started."""
    run_ranks(visible, 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if devices is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    assert run_ranks(visible, 1, fresh=True) == [devices]
    with WorkerGroup(1, Service, threads=1) as ranks:
        assert ranks.call("variable", "CUDA_VISIBLE_DEVICES") == [devices]
