"""What ranks are told whose modules differ, and about tensors that cannot be sent. It is loaded when it is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from common.distributed.agreement import differences
from common.errors import UsageError


class ReplicasDiffer(UsageError, RuntimeError):
    """The ranks have built different modules. All ranks raise it."""

    seen_by_all = True


def replicas_differ(everyone: Sequence[Mapping[str, str]]) -> ReplicasDiffer:
    """:param everyone: each rank's parameters, buffers and settings, described by their names; they are not the same on all"""
    if texts := differences(dict(enumerate(everyone))):
        return ReplicasDiffer(f"the ranks' modules differ: {texts[0]}")
    rank = next(rank for rank, theirs in enumerate(everyone) if list(theirs) != list(everyone[0]))
    return ReplicasDiffer(f"the ranks' modules differ: rank {rank} has rank 0's parameters in another order")


def require_sendable(tensors: Mapping[str, Tensor]) -> None:
    """:raises NotImplementedError: naming the first parameter or buffer whose elements do not all lie in memory that can be sent"""
    for name, tensor in tensors.items():
        kind = tensor.dtype if tensor.is_quantized else tensor.layout
        if kind is not torch.strided:
            raise NotImplementedError(
                f"{name} is {str(kind).removeprefix('torch.')} and cannot be sent to other ranks: turn it into a dense tensor, or name "
                "it in module._ddp_params_and_buffers_to_ignore"
            )
        if tensor.requires_grad and (dtype := getattr(tensor, "grad_dtype", None)) not in (None, tensor.dtype):
            raise NotImplementedError(
                f"{name} is {tensor.dtype} and its grad_dtype is {dtype}, but gradients are averaged in the parameter's own dtype: "
                "leave grad_dtype as it is"
            )
