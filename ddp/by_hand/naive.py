"""Data parallelism in its simplest form: after backward, one all-reduce per parameter.

    model = NaiveDistributedDataParallel(network)
    model(inputs).sum().backward()  # .grad is now the average over the ranks

    torchrun --nproc_per_node=2 -m ddp.train --strategy naive

It is right, but slow: every all-reduce waits for the one before, small ones cost almost as much as large ones, and none
begins before backward is over. ddp/by_hand/wrapper.py adds buckets and overlap.

The lesson is ``_average_gradients``. The rest notices when a backward pass begins, and refuses what cannot work.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from ddp.by_hand import errors
from ddp.by_hand.differing import require_sendable
from ddp.by_hand.outputs import tensors_in
from ddp.by_hand.replicas import broadcast
from ddp.by_hand.running import is_within_another_pass


class NaiveDistributedDataParallel(nn.Module):
    """Averages the gradients of ``module`` over the ranks of the default process group after every backward pass.

    A parameter that a rank did not use counts there as a gradient of zeros. A sparse gradient must come on all ranks or on none.
    Buffers are broadcast once, here.

    :param module: the same on every rank, but for the values: those of rank 0 are sent to all
    :raises NotImplementedError: for a buffer that cannot be sent
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True  # no_sync turns this off
        # Whether the latest forward pass was under no_sync; None if the gradients were averaged since, or there was none.
        self._local: bool | None = None
        self._scheduled = False  # whether the running backward pass has already asked for the averages
        # All ranks must begin with the same weights: averaged gradients keep them equal, but do not make them so.
        require_sendable(dict(module.named_buffers()))
        broadcast([*module.parameters(), *module.buffers()], 0, dist.distributed_c10d._get_default_group())
        for parameter in module.parameters():
            if parameter.requires_grad:
                hook = functools.partial(type(self)._ready, weakref.proxy(self))  # type: ignore[arg-type]
                weakref.finalize(self, parameter.register_post_accumulate_grad_hook(hook).remove)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """``module``'s forward; a backward pass from what it returns ends with the average over the ranks."""
        output = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self._local = not self.require_backward_grad_sync
            if self.require_backward_grad_sync:
                self._prepare_for_backward(output)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this block, forward passes lead to backward passes that add to ``.grad`` on this rank alone."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _prepare_for_backward(self, output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # activation checkpointing runs forward within backward
            self._scheduled = False
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._schedule)

    def _schedule(self, *_: Tensor) -> None:
        """Backward has begun: ask autograd to call :meth:`_average_gradients` when all of it is over."""
        if torch._C._current_autograd_node() is None:  # autograd traces the pass, and will not call
            raise NotImplementedError(errors.COMPILED_AUTOGRAD)
        if not self._scheduled:
            self._scheduled = True
            Variable._execution_engine.queue_callback(self._average_gradients)

    def _ready(self, _: Tensor) -> None:
        """A gradient is in ``.grad``.

        :raises RuntimeError: if a reentrant checkpoint's own backward pass has computed it, and no hook of an output came before
        """
        if self._scheduled or self._local:
            return
        if self._local is None:
            warnings.warn(errors.WITHOUT_FORWARD, stacklevel=1)
        elif is_within_another_pass():
            raise RuntimeError(errors.UNKNOWN_BEGINNING)
        else:  # the loss uses the parameter directly, or was kept elsewhere than in what forward returned
            self._schedule()

    @torch.no_grad()
    def _average_gradients(self) -> None:
        self._scheduled, self._local = False, None
        # In the same order on every rank: collectives are matched by their order.
        for parameter in self.module.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:  # not used on this rank, but the others wait for its contribution
                parameter.grad = torch.zeros_like(parameter)
            # Backends send memory and not elements. It must be in the parameter's order on all ranks, and without gaps.
            gradient = parameter.grad
            if not gradient.is_sparse and gradient.stride() != (dense := torch.empty_like(parameter)).stride():
                parameter.grad = dense.copy_(gradient)
            # Divided first, as in torch's DDP: the sum of many fp16 gradients might overflow.
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)
