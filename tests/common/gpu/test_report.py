"""common/gpu/report.py: a GPU's versions, variables and cores, in the log of a run and in the JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.gpu import report
from common.gpu.report import advice, gpu_software
from common.reporting.provenance import describe_machine

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("local", "usable", "words"),
    [
        ("0-3", {0, 1}, None),  # bound
        ("0-1,3,2", {0, 1, 2, 3}, None),
        ("0-3", set(range(8)), "4 of the 8 cores that this rank may use are far from its GPU"),
        ("0-3", {6, 7}, "2 of the 2 cores that this rank may use are far from its GPU"),
        (None, set(range(8)), None),  # the kernel does not tell, as in some virtual machines
    ],
)
def test_a_rank_whose_cores_are_far_from_its_gpu_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, local: str | None, usable: set[int], words: str | None
) -> None:
    """A rank whose cores are far from its gpu is told.

    Claim (ddp/README.md, 1): a rank's threads are its share of the launcher's cores; one whose cores are far from its
    GPU says so.
    """
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(report, "PCI", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: usable)
    if local is not None:
        (tmp_path / "0000:dc:00.0").mkdir()
        (tmp_path / "0000:dc:00.0" / "local_cpulist").write_text(f"{local}\n")
    line = advice(GPU)
    assert (
        line is None if words is None else line is not None and line.startswith(words) and "--numa-binding=node" in line
    )


H100 = SimpleNamespace(name="NVIDIA H100", uuid="1", pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "version").write_text("580.95.05\n")
    monkeypatch.setattr(report, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92600)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H100)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth1")


@pytest.mark.usefixtures("a_gpu")
def test_versions_and_variables_are_in_the_json() -> None:
    described = json.loads(json.dumps(describe_machine()))
    assert described["gpus"] == ["NVIDIA H100"]
    software = described["gpu_software"]
    assert {name: software[name] for name in ("driver", "cuda", "cudnn", "nccl")} == {
        "driver": "580.95.05", "cuda": "13.2", "cudnn": "9.26.0", "nccl": "2.30.7"
    }  # fmt: skip
    assert software["variables"].items() >= {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "=eth1"}.items()
    assert "PATH" not in software["variables"]


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize("runs", ["ProcessGroupNCCL", "ProcessGroupNCCL2"])
def test_the_log_begins_with_them(caplog: pytest.LogCaptureFixture, runs: str) -> None:
    caplog.set_level("INFO")
    report.log_gpu(torch.device("cuda", 0), runs)
    first, *others = caplog.messages
    assert first.startswith(f"NVIDIA H100: {runs}, driver 580.95.05, cuda 13.2, cudnn 9.26.0, nccl 2.30.7; ")
    assert "NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME==eth1" in first
    assert [line.partition(" all-reduces")[0] for line in others] == (
        ["ProcessGroupNCCL2 does not overlap DDP's"] if runs == "ProcessGroupNCCL2" else []
    )


@pytest.mark.gpu
def test_a_real_gpu_has_versions() -> None:
    assert all(gpu_software()[name] for name in ("cuda", "cudnn", "nccl"))  # not each system shows the driver's
