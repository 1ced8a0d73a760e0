"""Forward and backward in a lower precision, with parameters, gradients and updates in full precision.

Each forward pass computes with copies of the parameters in the lower precision. The copy is an operation that autograd records, so
its backward turns each gradient into the parameter's own precision again. (torch's own replaces ``parameter.data`` for the time
between; it needs an accelerator: on a CPU, torch 2.15 built for CUDA fails when it makes a stream.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils._pytree import tree_map_only

from ddp.by_hand.replicas import replicated

MixedPrecision = _MixedPrecision


def cast_buffers(module: nn.Module, precision: MixedPrecision) -> None:
    """Turn the floating point buffers into ``buffer_dtype``, for good, as torch does."""
    if precision.buffer_dtype is not None:
        for buffer in replicated(module, parameters=False).values():
            if buffer.is_floating_point():
                buffer.data = buffer.to(precision.buffer_dtype)


def call_in(precision: MixedPrecision, module: nn.Module, inputs: Any, kwargs: Any) -> Any:
    """``module(*inputs, **kwargs)`` with floating point parameters and inputs in ``param_dtype``."""
    dtype = precision.param_dtype
    if dtype is None:
        return module(*inputs, **kwargs)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    parameters = {name: cast(p) for name, p in replicated(module, buffers=False).items()}
    return functional_call(module, parameters, *tree_map_only(Tensor, cast, (inputs, kwargs)))


def averaged_in(precision: MixedPrecision, group: dist.ProcessGroup) -> Callable[..., torch.futures.Future[Tensor]]:
    """A communication hook that sums in ``reduce_dtype``, or in ``param_dtype`` if that is None, as torch's does."""
    dtype = precision.reduce_dtype or precision.param_dtype

    def hook(_: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        buffer: Tensor = bucket.buffer()
        reduced = buffer.to(dtype)
        work = dist.all_reduce(reduced, group=group, async_op=True)
        assert work is not None
        size = group.size()
        return work.get_future().then(lambda _: buffer.copy_(reduced).div_(size))

    return hook
