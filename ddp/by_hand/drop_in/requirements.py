"""What a wrapper asks of its module, of a hook, and of a backward pass; each refusal says what to do instead."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter

from ddp.by_hand.replicas import replicated


def group_of(mesh: DeviceMesh, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is not None:
        raise RuntimeError("pass process_group or device_mesh, not both")
    if mesh.ndim != 1:
        raise RuntimeError(f"device_mesh must have one dimension, not {mesh.ndim}: pass the slice of the replicas")
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
        raise ValueError(f"device_ids={list(device_ids)} must be None or name one device")
    kinds = {parameter.device.type for parameter in parameters}
    if len(kinds) > 1:
        raise ValueError(
            f"the module's parameters are on {' and '.join(sorted(kinds))}: move them to devices of one kind"
        )
    if kinds == {"cpu"} and output_device is not None:
        raise ValueError(f"output_device={output_device}, but the module is on the CPU: leave it out")
    if kinds == {"cpu"} and any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        raise ValueError("torch's SyncBatchNorm works on GPUs alone: see ddp/batchnorm.py for one that works on a CPU")


def require_annotations(hook: Callable[..., Any]) -> None:
    """:raises ValueError: if a communication hook's annotations are of something else; torch's accepts fewer"""
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    if (
        bucket is not None
        and isinstance(bucket.annotation, type)
        and bucket.annotation.__name__ not in ("_empty", "GradBucket")
    ):
        raise ValueError(f"a communication hook's bucket is a dist.GradBucket, not {bucket.annotation}")
    result = signature.return_annotation
    if isinstance(result, type) and result.__name__ not in ("_empty", "Future"):
        raise ValueError(f"a communication hook returns a torch.futures.Future[torch.Tensor], not {result}")


def refuse_compiled_autograd() -> None:
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")  # torch._dynamo takes seconds to import
    if compiled is not None and compiled.compiled_autograd_enabled:
        raise NotImplementedError(
            "compiled autograd traces backward, where hooks cannot start all-reduces: compile the module, not its backward pass"
        )
