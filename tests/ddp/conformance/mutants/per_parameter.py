"""What many mutants change one line of: the naive wrapper in steps that can be replaced, and torch's DDP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp.by_hand.naive import NaiveDistributedDataParallel
from ddp.by_hand.outputs import tensors_in


class TorchDDP(DistributedDataParallel):
    """torch's, for a defect in a subclass."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]


class AverageEach(NaiveDistributedDataParallel):
    """After backward, one all-reduce per parameter; takes torch's options and follows none."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module)

    def outputs(self, output: Any) -> list[Tensor]:
        """The tensors in what the module returns."""
        return list(tensors_in(output))

    def average(self, gradient: Tensor) -> None:
        """Average one gradient in place."""
        gradient /= dist.get_world_size()
        dist.all_reduce(gradient)

    def finish(self) -> None:
        """Backward is over: average all gradients."""
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self.average(parameter.grad)

    def _prepare_for_backward(self, output: Any) -> None:
        super()._prepare_for_backward(self.outputs(output))

    @torch.no_grad()
    def _average_gradients(self) -> None:
        self._scheduled = False
        self.finish()
