"""What a training step calls to be guarded, and the default: nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from common.data.datasets import Batch


class StepGuard:
    """The guard that does nothing. ddp/resilience/guard.py has the one that keeps a job alive."""

    def wrap(self, network: nn.Module) -> nn.Module:
        """The module that DDP wraps."""
        return network

    def begin(self, job: Any) -> None:
        """Called once, when the job is built."""

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """This rank's micro-batches of an epoch."""
        return iter(loader)

    def attach(self, loss: Tensor) -> Tensor:
        """The loss of a micro-step, 0-d, whose backward pass comes next."""
        return loss

    def accepts(self, norm: Tensor) -> bool:
        """Whether the optimizer may take the step; the same on every rank.

        :param norm: 0-d, of the averaged and unscaled gradients
        """
        return True
