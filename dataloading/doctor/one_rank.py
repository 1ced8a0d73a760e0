"""``SyncBatchNorm`` on one rank, for the stand-in for GPUs: torch's own needs a GPU."""

from __future__ import annotations

from torch import Tensor, nn


class SyncBatchNorm:
    """Its ``forward`` takes the place of torch's."""

    @staticmethod
    def forward(module: nn.SyncBatchNorm, x: Tensor) -> Tensor:
        """The statistics of the only rank are those of all."""
        return nn.modules.batchnorm._BatchNorm.forward(module, x)
