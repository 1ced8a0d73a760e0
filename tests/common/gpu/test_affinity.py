"""common/gpu/affinity.py: the cores beside a GPU, and who is told to bind ranks to them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.gpu import affinity
from common.gpu.affinity import advice, cores_beside

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
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(affinity, "PCI", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: usable)
    if local is not None:
        (tmp_path / "0000:dc:00.0").mkdir()
        (tmp_path / "0000:dc:00.0" / "local_cpulist").write_text(f"{local}\n")
    line = advice(GPU)
    assert (
        line is None if words is None else line is not None and line.startswith(words) and "--numa-binding=node" in line
    )


@pytest.mark.gpu
def test_a_real_gpu_has_cores_beside_it() -> None:
    assert cores_beside(GPU) <= set(range(os.cpu_count() or 1))
