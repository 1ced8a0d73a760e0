"""The facts that must be the same on all ranks of a job: its settings, its software, and the environment that changes results."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import torch

from common.command_line.cli import settings_of
from common.distributed.agreement import GPU, GPU_KIND, UNKNOWN
from common.distributed.dist_env import DistEnv
from common.gpu.devices import identity_of, kind_of

PACKAGES = ("common", "ddp", "dataloading", "dataparallel")
# Variables that change what is computed, or whether the ranks' collectives fit together.
VARIABLES = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "TORCH_DIST_USE_NCCL2",
)
# Numbers of the scheduler's job, on the ranks that know it: two jobs that were given one place to meet would be taken for one.
SCHEDULER_JOBS = ("SLURM_JOB_ID", "LSB_JOBID", "AZUREML_RUN_ID")


def launch_facts(env: DistEnv, settings: Any) -> dict[str, str]:
    """By name, as text, what :func:`common.distributed.agreement.require_agreement` compares.

    :param settings: the command's dataclass, see :func:`common.command_line.cli.option`; None if it has none
    """
    return {
        **({} if settings is None else settings_of(settings)),
        "the backend": f"{env.backend} on {env.device.type}",
        **software(),
        **{name: os.environ.get(name, "not set") for name in VARIABLES},
        **{name: os.environ.get(name, UNKNOWN) for name in SCHEDULER_JOBS},
        **(gpu_facts(env) if env.device.type == "cuda" else {}),
    }


def gpu_facts(env: DistEnv) -> dict[str, str]:
    """The GPU that a rank has for itself. Under gloo, ranks may share a GPU."""
    gpu = f"{identity_of(env.device)} of {env.host}" if env.backend == "nccl" else UNKNOWN
    return {GPU: gpu, GPU_KIND: kind_of(env.device)}


def software() -> dict[str, str]:
    """The versions that this rank runs."""
    return {
        "the version of torch": torch.__version__,
        "the version of Python": ".".join(platform.python_version_tuple()[:2]),
        "the digest of this project's source": source_digest(),
    }


@functools.cache
def source_digest() -> str:
    """The checksum of all Python files of this project's packages: two hosts may have different checkouts of one version."""
    root = Path(__file__).parent.parent.parent
    digest = hashlib.sha256()
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
