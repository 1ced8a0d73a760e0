"""The versions and variables that a GPU's speed and results depend on: for the log of a run, and the JSON of every result."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

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


def software_line() -> str:
    """The same, to be read."""
    found = gpu_software()
    variables = ", ".join(f"{name}={value}" for name, value in found.pop("variables").items())
    return f"{', '.join(f'{name} {version}' for name, version in found.items())}; {variables or 'no variables'}"


def _dotted(version: int | None) -> str | None:
    """cuDNN's number with dots: 92600 is 9.26.0. (Before 9, the first digit stood for a thousand: 8902 is 8.9.2.)"""
    if version is None:
        return None
    major, rest = divmod(version, 10_000) if version >= 90_000 else divmod(version, 1000)
    return f"{major}.{rest // 100}.{rest % 100}"
