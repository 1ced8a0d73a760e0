"""A rank's GPU in the log of a run, and in the JSON of every result: its versions and variables, and the cores beside it.

A rank on cores that are far from its GPU reaches it through another processor, as the GPU reaches what the rank pins. torchrun binds
each rank to the cores of its GPU's NUMA node: ``torchrun --numa-binding=node`` (torch/numa/binding.py; it needs the program numactl).
So do ``srun --gpu-bind=closest`` and ``mpirun --bind-to numa``. Here a rank finds out whether that is worth it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from common.gpu.devices import NCCL2_VARIABLE, WITHOUT_OVERLAP, kind_of

PCI = Path("/sys/bus/pci/devices")


def cores_beside(device: torch.device) -> set[int]:
    """The CPU cores next to a GPU, as the kernel numbers them; empty if it does not tell."""
    its: Any = torch.cuda.get_device_properties(device)
    address = f"{its.pci_domain_id:04x}:{its.pci_bus_id:02x}:{its.pci_device_id:02x}.0"
    try:
        ranges = (PCI / address / "local_cpulist").read_text().strip()
    except OSError:
        return set()
    cores: set[int] = set()
    for part in filter(None, ranges.split(",")):  # 0-2,8 is 0, 1, 2 and 8
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def advice(device: torch.device) -> str | None:
    """A line for a rank whose cores are not all beside its GPU; None where they are, or the kernel does not tell."""
    beside, usable = cores_beside(device), os.sched_getaffinity(0)
    if not beside or usable <= beside:
        return None
    return (
        f"{len(usable - beside)} of the {len(usable)} cores that this rank may use are far from its GPU: torchrun --numa-binding=node "
        "(which needs numactl) or srun --gpu-bind=closest binds each rank to those beside its GPU"
    )


PREFIXES = (
    "NCCL_",
    "TORCH_NCCL_",
    "TORCH_DIST_",
    "CUDA_",
    "CUBLAS_",
    "CUDNN_",
    "NVIDIA_TF32_",
    "PYTORCH_CUDA_",
    "PYTORCH_ALLOC_",
)
DRIVER = Path("/sys/module/nvidia/version")


def gpu_software() -> dict[str, Any]:
    """Versions of the driver (None if the system does not tell it), CUDA, cuDNN and NCCL, and the variables that they read."""
    return {
        "driver": DRIVER.read_text().strip() if DRIVER.is_file() else None,
        "cuda": torch.version.cuda,
        "cudnn": _dotted(torch.backends.cudnn.version()),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
    }


def _dotted(version: int | None) -> str | None:
    """cuDNN's number with dots: 92600 is 9.26.0."""
    return None if version is None else f"{version // 10_000}.{version // 100 % 100}.{version % 100}"


logger = logging.getLogger(__name__)


def log_gpu(device: torch.device, runs: str) -> None:
    """Log the GPU, its software, and what may make it slow.

    :param runs: the class that carries out the collectives of this GPU
    """
    software = gpu_software()
    variables = ", ".join(f"{name}={value}" for name, value in software.pop("variables").items())
    versions = ", ".join(f"{name} {version}" for name, version in software.items())
    logger.info(f"{kind_of(device)}: {runs}, {versions}; {variables or 'no variables'}")
    if runs == WITHOUT_OVERLAP:
        logger.info(
            f"{runs} does not overlap DDP's all-reduces with the backward pass: {NCCL2_VARIABLE}=0 chooses the one that does"
        )
    if (line := advice(device)) is not None:
        logger.info(line)
