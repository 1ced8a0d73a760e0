"""The base of all-reduces that are made of sends and receives."""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import UsageError
from ddp.all_reduce.base import AllReduce
from ddp.all_reduce.p2p import P2P


class SendReceiveAllReduce(AllReduce):
    """Point-to-point messages to the other ranks, and memory for those that arrive. For CPU tensors.

    :param p2p: the ranks over which tensors are summed
    """

    def __init__(self, p2p: P2P) -> None:
        super().__init__()
        self._p2p = p2p
        self._memory = torch.empty(0, dtype=torch.uint8)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """:raises UsageError: for another device than the CPU"""
        if device.type != "cpu":
            raise UsageError(f"an all-reduce by hand sums tensors of the CPU, not of {device}: use the backend's")
        return super().allocate(numel, dtype, device)

    def _scratch(self, like: Tensor) -> Tensor:
        """Memory for a tensor ``like`` this one, the same in every call: the page faults of new memory would cost as much as
        the transfer."""
        if self._memory.numel() < like.nbytes:
            self._memory = torch.empty(like.nbytes, dtype=torch.uint8)
        return self._memory[: like.nbytes].view(like.dtype)

    def _receive_and_add(self, buffer: Tensor, source: int) -> None:
        incoming = self._scratch(buffer)
        self._p2p.receive(incoming, source)
        buffer += incoming
