"""The wrappers of which mutants change one thing: torch's DDP, and one all-reduce per parameter after backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors


class _Steps(nn.Module):
    """A wrapper whose subclass may do something after wrapping, before a forward pass, and after one."""

    module: Any

    def prepare(self) -> None:
        """The module is wrapped."""

    def before_forward(self) -> None:
        """A forward pass begins."""

    def after_forward(self, output: Any) -> Any:
        """A forward pass has ended; returns what the wrapper is to return."""
        return output


class TorchDDP(_Steps, DistributedDataParallel):
    """torch's own."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.prepare()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.before_forward()
        return self.after_forward(super().forward(*inputs, **kwargs))  # type: ignore[no-untyped-call, unused-ignore]


def torch_with(**fixed: Any) -> Any:
    """torch's DDP, which always has these options."""
    return lambda module, **options: TorchDDP(module, **options | fixed)


def torch_without(ignored: str) -> Any:
    """torch's DDP, which accepts this option and ignores it."""
    return lambda module, **options: TorchDDP(
        module, **{name: value for name, value in options.items() if name != ignored}
    )


class AverageEach(_Steps):
    """After backward, one all-reduce per parameter; takes torch's options and follows none."""

    no_sync = DistributedDataParallel.no_sync

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module, self.require_backward_grad_sync = module, True
        self.trained: list[Any] = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        self.prepare()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.before_forward()
        output = self.module(*inputs, **kwargs)
        if self.require_backward_grad_sync:
            self.prepare_for_backward(output)
        return self.after_forward(output)

    def outputs(self, output: Any) -> list[Tensor]:
        """The tensors in what the module returns."""
        return list(_find_tensors(output))  # type: ignore[no-untyped-call, unused-ignore]

    def prepare_for_backward(self, output: Any) -> None:
        """A backward pass will come along the outputs."""
        self.scheduled = False
        for tensor in self.outputs(output):
            if tensor.requires_grad:
                tensor.register_hook(self.schedule)

    @torch.no_grad()
    def schedule(self, _: Tensor) -> None:
        """Backward has begun: average when it is over."""
        if not self.scheduled:
            self.scheduled = True
            Variable._execution_engine.queue_callback(torch.no_grad()(self.finish))

    def finish(self) -> None:
        """Backward is over: average all gradients."""
        for parameter in self.trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.average(parameter.grad)

    def average(self, gradient: Tensor) -> None:
        """Average one gradient in place."""
        gradient /= dist.get_world_size()
        dist.all_reduce(gradient)


class AtOnce(AverageEach):
    """Sends each gradient in its own post-accumulate hook: later hooks see the average, and each rank has an order of its own."""

    def prepare(self) -> None:
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self.ready)

    @torch.no_grad()
    def ready(self, parameter: Any) -> None:
        """A gradient is in ``.grad``."""
        self.average(parameter.grad)

    def finish(self) -> None:
        """All has been sent."""


class Together(TorchDDP):
    """Lets the ranks wait for each other before each forward pass."""

    def before_forward(self) -> None:
        dist.barrier()
