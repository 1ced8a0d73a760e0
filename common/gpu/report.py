"""What a run's log says of a rank's GPU when it begins. (The console shows rank 0's lines, each rank's file its own.)"""

from __future__ import annotations

import logging

import torch

from common.gpu import affinity
from common.gpu.devices import kind_of
from common.gpu.nccl import VARIABLE, WITHOUT_OVERLAP, implementation
from common.gpu.software import software_line

logger = logging.getLogger(__name__)


def log_gpu(device: torch.device) -> None:
    """The GPU, what runs on it, and what may make it slow. A process group must have been made."""
    runs = implementation(device)
    logger.info(f"{kind_of(device)}: {runs}, {software_line()}")
    if runs == WITHOUT_OVERLAP:
        logger.info(
            f"{runs} does not overlap DDP's all-reduces with the backward pass: {VARIABLE}=0 chooses the one that does"
        )
    if (line := affinity.advice(device)) is not None:
        logger.info(line)
