"""Automatic mixed precision: which region computes in low precision; and how a GPU computes the rest.

``fp32``: none. ``bf16``: autocast. Its exponent is fp32's, so gradients neither overflow nor vanish and need no scaling.
``fp16``: autocast and a :class:`torch.amp.GradScaler`, since gradients below 3e-8 would become zero. The weights stay fp32.
"""

from __future__ import annotations

import os
import warnings

import torch

from common.errors import UsageError

PRECISIONS = ("fp32", "bf16", "fp16")
LOW_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")  # of cuBLAS


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The region in which matrix products and convolutions take the low precision. Backward belongs outside it.

    :param precision: one of :data:`PRECISIONS`; in fp32 the region changes nothing
    """
    dtype = LOW_DTYPES.get(precision, torch.bfloat16)
    return torch.autocast(device.type, dtype=dtype, enabled=precision in LOW_DTYPES)


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for matrix products in bf16. Without them it converts to fp32 and back, slowly."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    features = ("avx512_bf16", "amx_bf16", "bf16")  # the last is ARM's
    return any(torch.cpu.get_capabilities().get(name) for name in features)


def describe_arithmetic(device: torch.device, precision: str, tf32: bool) -> str:
    """For the log: ``bf16``, or how fp32 is computed.

    :param tf32: whether :func:`set_arithmetic` has allowed it; GPUs have it since Ampere
    """
    if precision == "fp32" and tf32 and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return "fp32 rounded to TF32"
    return precision


def set_arithmetic(device: torch.device, tf32: bool, deterministic: bool, cudnn_benchmark: bool) -> None:
    """Choose how this process computes in fp32, and by which algorithms; before its first use of cuBLAS, which reads an
    environment variable then.

    By default torch lets a GPU's convolutions round to TF32 and its matrix products not. Here both do or none.

    :raises UsageError: when the environment lets cuBLAS choose algorithms that are not deterministic
    """
    if device.type == "cuda":
        # The newer names, fp32_precision, would make torch's own code fail that reads the older ones: cudnn.flags(), and
        # torch.compile in some versions (pytorch#166387). In others, the older ones give a warning.
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.backends.cudnn.allow_tf32 = tf32
    if deterministic:
        workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", DETERMINISTIC_WORKSPACES[0])
        if workspace not in DETERMINISTIC_WORKSPACES:
            allowed = " or ".join(DETERMINISTIC_WORKSPACES)
            raise UsageError(
                f"--deterministic: CUBLAS_WORKSPACE_CONFIG is {workspace}: set it to {allowed}, or unset it"
            )
        torch.use_deterministic_algorithms(True)
        # Or every new tensor is filled first, which takes time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = cudnn_benchmark
