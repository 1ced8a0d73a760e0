"""The GPUs that this process can use, which one a rank takes, why there may be none, and which of torch's implementations of NCCL runs.

Since torch 2.15 the name "nccl" is ProcessGroupNCCL2 (pytorch#192281), with which DDP overlaps nothing. For each bucket, DDP asks the
all-reduce for its future; there the stream of the backward pass is made to wait for the all-reduce (``WorkNCCL::getFuture`` in
torch/csrc/distributed/c10d/nccl2/WorkNCCL.cpp). The older ProcessGroupNCCL marks its futures with events of its own stream, and DDP
waits for them at the end of the backward pass. It is still there, and is what runs here.
"""

from __future__ import annotations

import logging
import os
import warnings

import torch

logger = logging.getLogger(__name__)


def count_gpus() -> int:
    """How many GPUs this process can use. A driver that is there but cannot be used is one line, and not torch's warning."""
    with warnings.catch_warnings(record=True) as torchs_warnings:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # torch warns once per process, and only where there is a driver. One rank of a node says it for all.
    if torchs_warnings and os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning(why_no_gpu())
    return count


def why_no_gpu() -> str:
    """The reason for which no GPU is usable in this process, in torch's words, and what to check."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the second from a build without CUDA
        reason = str(error).strip().splitlines()[0].split(". ")[0].rstrip(".")
    else:
        reason = "CUDA shows none"
    cure = "check nvidia-smi"
    if "driver on your system is too old" in reason:
        cure = f"update the driver, or install a torch that is built for an older CUDA than {torch.version.cuda}"
    return f"no CUDA device is usable here ({reason}): {cure}"


def gpu_of(local_rank: int, gpus: int) -> torch.device:
    """The GPU that a rank takes.

    Usually all ranks of a node see all its GPUs, and each takes the one of its number. A launcher may show each rank its own
    instead (``torchrun --virtual-local-rank``, a ``CUDA_VISIBLE_DEVICES`` for each task): then there are fewer than ranks, and the
    rank's number goes around them. Ranks that meet on one GPU in this way are found when they compare their facts
    (ddp/rendezvous/launch_facts.py).

    :param local_rank: among the ranks of this node, from 0
    :param gpus: those that this process can use, 1 or more
    """
    return torch.device("cuda", local_rank % gpus)


def kind_of(device: torch.device) -> str:
    """The name of a GPU's model, as ``NVIDIA H100 80GB HBM3``."""
    return str(torch.cuda.get_device_properties(device).name)


def identity_of(device: torch.device) -> str:
    """A GPU's own name, which no other has, whatever its number in this process."""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} GPU-{properties.uuid}"


# HACK: torch documents neither. When the variable goes, all-reduces may no longer overlap; a run's log then warns, by the class.
NCCL2_VARIABLE = "TORCH_DIST_USE_NCCL2"
WITHOUT_OVERLAP = "ProcessGroupNCCL2"


def choose_implementation() -> None:
    """Have torch build the older implementation, unless the user has chosen. To be called before the first group of this process:
    torch reads the variable then (``_register_builtin_nccl_backend``), and not again. Versions with only one ignore it."""
    os.environ.setdefault(NCCL2_VARIABLE, "0")
