"""Which of torch's two implementations of NCCL runs under the name "nccl".

Since torch 2.15 it is ProcessGroupNCCL2 (pytorch#192281), with which DDP overlaps nothing. For each bucket, DDP asks the all-reduce
for its future; there the stream of the backward pass is made to wait for the all-reduce (``WorkNCCL::getFuture`` in
torch/csrc/distributed/c10d/nccl2/WorkNCCL.cpp). The older ProcessGroupNCCL marks its futures with events of its own stream, and DDP
waits for them at the end of the backward pass. It is still there, and is what runs here.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import torch
import torch.distributed as dist

VARIABLE = "TORCH_DIST_USE_NCCL2"
WITHOUT_OVERLAP = "ProcessGroupNCCL2"


def choose_implementation(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have torch build the older implementation, unless the user has chosen. To be called before the first group of this process:
    torch reads the variable then (``_register_builtin_nccl_backend``), and not again. Versions with only one ignore it."""
    environment.setdefault(VARIABLE, "0")


def implementation(device: torch.device) -> str:
    """The class that carries out the default group's collectives for tensors of this device, as ``ProcessGroupGloo``."""
    group = dist.group.WORLD
    assert group is not None
    return type(group._get_backend(device)).__name__
