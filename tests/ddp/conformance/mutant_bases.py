"""What the mutants change one line of: the naive wrapper in steps that can be replaced, and torch's DDP."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp.by_hand.naive import NaiveDistributedDataParallel
from ddp.by_hand.outputs import tensors_in


class _Steps(nn.Module):
    """A wrapper whose subclass may do something after wrapping, before a forward pass, and after one."""

    module: nn.Module

    def prepare(self) -> None:
        """The module is wrapped."""

    def before_forward(self) -> None:
        """A forward pass begins."""

    def after_forward(self, output: Any) -> Any:
        """A forward pass has ended; returns what the wrapper is to return."""
        return output

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.before_forward()
        return self.after_forward(super().forward(*inputs, **kwargs))


class TorchDDP(_Steps, DistributedDataParallel):
    """torch's, with some options replaced."""

    overrides: ClassVar[dict[str, Any]] = {}

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options | self.overrides)
        self.prepare()


class AverageEach(_Steps, NaiveDistributedDataParallel):
    """After backward, one all-reduce per parameter; takes torch's options and follows none."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module)
        self.prepare()

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

    def used(self) -> list[bool]:
        """Which parameters have a gradient on this rank."""
        return [parameter.grad is not None for parameter in self.module.parameters()]

    def keep(self, receivers: list[bool]) -> None:
        """Drop the gradients of all other parameters."""
        for parameter, receives in zip(self.module.parameters(), receivers, strict=True):
            if not receives:
                parameter.grad = None

    def _ready(self, _: Tensor) -> None:
        """The output alone says that backward has begun."""

    def _prepare_for_backward(self, output: Any) -> None:
        super()._prepare_for_backward(self.outputs(output))

    @torch.no_grad()
    def _average_gradients(self) -> None:
        self._scheduled = False
        self.finish()


def users(used: list[bool]) -> list[int]:
    """How many ranks use each parameter."""
    everywhere: list[list[bool]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, used)
    return [sum(flags) for flags in zip(*everywhere, strict=True)]


class AtOnce(AverageEach):
    """Sends each gradient in its own post-accumulate hook: later hooks see the average, and each rank has an order of its own."""

    def prepare(self) -> None:
        for parameter in self.module.parameters():
            parameter.register_post_accumulate_grad_hook(self.ready)

    @torch.no_grad()
    def ready(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.average(parameter.grad)

    def finish(self) -> None:
        """All has been sent."""
