"""The cores beside a GPU. A rank on other cores reaches its GPU through another processor, as the GPU reaches what the rank pins.

torchrun binds each rank to the cores of its GPU's NUMA node: ``torchrun --numa-binding=node`` (torch/numa/binding.py; it needs the
program numactl). So do ``srun --gpu-bind=closest`` and ``mpirun --bind-to numa``. Here a rank finds out whether that is worth it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

PCI = Path("/sys/bus/pci/devices")


def cores_beside(device: torch.device) -> set[int]:
    """The CPU cores next to a GPU, as the kernel numbers them; empty if it does not tell."""
    its: Any = torch.cuda.get_device_properties(device)
    address = f"{its.pci_domain_id:04x}:{its.pci_bus_id:02x}:{its.pci_device_id:02x}.0"
    try:
        return parse_cores((PCI / address / "local_cpulist").read_text())
    except OSError:
        return set()


def parse_cores(ranges: str) -> set[int]:
    """The kernel's short form of cores: ``0-2,8`` is 0, 1, 2 and 8."""
    found: set[int] = set()
    for part in filter(None, ranges.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def advice(device: torch.device) -> str | None:
    """A line for a rank whose cores are not all beside its GPU; None where they are, or the kernel does not tell."""
    beside, usable = cores_beside(device), os.sched_getaffinity(0)
    if not beside or usable <= beside:
        return None
    return (
        f"{len(usable - beside)} of the {len(usable)} cores that this rank may use are far from its GPU: torchrun --numa-binding=node "
        "(which needs numactl) or srun --gpu-bind=closest binds each rank to those beside its GPU"
    )
