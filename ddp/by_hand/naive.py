"""Data parallelism in its simplest form: after backward, one all-reduce per parameter.

    model = NaiveDistributedDataParallel(network)
    model(inputs).sum().backward()  # .grad is now the average over the ranks

    torchrun --nproc_per_node=2 -m ddp.train --strategy naive

It is right, but slow: every all-reduce waits for the one before, small ones cost almost as much as large ones, and none
begins before backward is over. ddp/by_hand/wrapper.py adds buckets and overlap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from ddp.by_hand.outputs import tensors_in


class NaiveDistributedDataParallel(nn.Module):
    """Averages the gradients of ``module`` over the ranks of the default process group after every backward pass.

    A parameter that a rank did not use counts there as a gradient of zeros. Buffers are broadcast once, here.

    :param module: the same on every rank, but for the values: those of rank 0 are sent to all
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._synchronize = True  # no_sync turns this off
        self._scheduled = False  # whether the running backward pass has already asked for the averages
        # All ranks must begin with the same weights: averaged gradients keep them equal, but do not make them so.
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """``module``'s forward; a backward pass from what it returns ends with the average over the ranks."""
        output = self.module(*inputs, **kwargs)
        if self._synchronize and torch.is_grad_enabled():
            self._prepare_for_backward(output)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this block, forward passes lead to backward passes that add to ``.grad`` on this rank alone."""
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _prepare_for_backward(self, output: Any) -> None:
        self._scheduled = False
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._schedule)

    def _schedule(self, _: Tensor) -> None:
        """Backward has begun: ask autograd to call :meth:`_average_gradients` when all of it is over."""
        if not self._scheduled:
            self._scheduled = True
            Variable._execution_engine.queue_callback(self._average_gradients)

    @torch.no_grad()
    def _average_gradients(self) -> None:
        self._scheduled = False
        # In the same order on every rank: collectives are matched by their order.
        for parameter in self.module.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:  # not used on this rank, but the others wait for its contribution
                parameter.grad = torch.zeros_like(parameter)
            # Divided first, as in torch's DDP: the sum of many fp16 gradients might overflow.
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)
