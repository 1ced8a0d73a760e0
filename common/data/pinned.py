"""Pinned (page-locked) memory: a GPU reads it by itself, while the host goes on. It reads other memory by way of a copy, for
which the host waits.

torch's own pinned memory belongs to one process. Memory that several processes share is locked where it lies, by
``cudaHostRegister``, as torch/cuda/_pin_memory_utils.py does.
"""

from __future__ import annotations

import contextlib
import os
import weakref

import torch
from torch import Tensor

from common.errors import UsageError

PORTABLE = 1  # cudaHostRegisterPortable: for every GPU of this process


def pinned_memory(shape: tuple[int, ...]) -> Tensor:
    """New pinned memory of this process, uint8."""
    return torch.empty(shape, dtype=torch.uint8, pin_memory=True)


def pin_shared(memory: Tensor, device: torch.device, remedy: str) -> None:
    """Lock the pages of a tensor on the CPU, for as long as this tensor lives. (A view or an array of it does not count.)

    torch does not know which copies from such memory are still running: before it is written again, they must be waited for.

    :param memory: alone on its pages
    :param device: a GPU that will read it
    :param remedy: what to do where CUDA refuses, for the error's text
    :raises UsageError: when CUDA refuses
    """
    if not memory.nbytes:
        return
    cudart, address = torch.cuda.cudart(), memory.data_ptr()
    with torch.cuda.device(device):  # or it might be the first use of GPU 0, and take some of that one's memory
        status = int(cudart.cudaHostRegister(address, memory.nbytes, PORTABLE))
    if status:
        reason = cudart.cudaGetErrorString(cudart.cudaError(status))
        with contextlib.suppress(RuntimeError):  # CUDA remembers the error, and the next kernel raises it
            torch.zeros(1, device=device)
        raise UsageError(
            f"{memory.nbytes / 1e6:.1f} MB of shared memory cannot be pinned for {device} ({reason}): {remedy}"
        )
    # Before the memory is unmapped. At the end of the process, CUDA does it.
    weakref.finalize(memory, _unpin, address, device, os.getpid()).atexit = False


def _unpin(address: int, device: torch.device, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked worker, which has a copy of the tensor, and no CUDA
        with torch.cuda.device(device):
            torch.cuda.cudart().cudaHostUnregister(address)
