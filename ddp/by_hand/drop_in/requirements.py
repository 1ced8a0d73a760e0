"""Refusals of modules, hooks and backward passes that the drop-in cannot work with; each says what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter

from ddp.by_hand.replicas import replicated


def group_of(mesh: DeviceMesh, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, not {mesh.ndim}D: pass the slice of the replicas")
    return mesh.get_group(mesh_dim=0)


def require_wrappable(
    module: nn.Module, device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None
) -> None:
    from torch.distributed.tensor import DTensor

    parameters = [*replicated(module, buffers=False).values()]
    if any(isinstance(parameter, UninitializedParameter) for parameter in parameters):
        raise RuntimeError("the module has uninitialized parameters: run one forward pass before wrapping it")
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        raise NotImplementedError(
            "the module has DTensor parameters: use torch's DistributedDataParallel for 2-d parallelism"
        )
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids={list(device_ids)}: device_ids can only be None or contain a single element")
    kinds = {parameter.device.type for parameter in parameters}
    if len(kinds) > 1:
        raise ValueError(
            f"the module's parameters are on {' and '.join(sorted(kinds))}: move them to devices of one kind"
        )
    if kinds == {"cpu"} and output_device is not None:
        raise ValueError(f"output_device={output_device}, but the module is on the CPU: leave it out")
    if kinds == {"cpu"} and any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        raise ValueError(
            "SyncBatchNorm layers only work with GPU modules: see ddp/batchnorm.py for one that works on a CPU"
        )


def require_copies_when_nested(module: nn.Module, as_view: bool) -> None:
    """Two wrappers of one parameter average the same ``.grad``: each needs a copy of what backward has put there.

    :raises ValueError: if the module holds a wrapper, and this one or that one lets ``.grad`` be a view into its buckets
    """
    for name, inner in module.named_modules():
        if hasattr(inner, "require_backward_grad_sync") and (
            as_view or getattr(inner, "gradient_as_bucket_view", True)
        ):
            raise ValueError(
                f"{name or 'the module'} is wrapped already, and both wrappers would let .grad be a view into their buckets: "
                "wrap only one of them, or pass gradient_as_bucket_view=False to both"
            )
