"""Collectives that Python code calls: the script's own, or a library's. (DDP's reducer sums in C++ and is not seen here.)"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import tensors
from .events import called_by_script, emit, quiet, watch, where
from .tensors import find_tensors

NAMES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "gather",
    "gather_object",
    "broadcast_object_list",
    "reduce_scatter_tensor",
    "all_to_all",
    "barrier",
)
_gathered: list[tuple[Any, bool, str]] = []  # lists that an all_gather has filled with tensors that lead nowhere


def install() -> None:
    if not dist.is_available():
        return
    for name in NAMES:
        _watch(name)

    @watch(torch.Tensor, "backward")
    def backward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        _before_backward()
        return original(self, *args, **kwargs)


def _watch(name: str) -> None:
    @watch(dist, name)
    def collective(original: Any, *args: Any, **kwargs: Any) -> Any:
        before = _scalar(args)
        result = original(*args, **kwargs)
        _called(name, args, before, _scalar(args))
        return result


def _scalar(args: Any) -> float | None:
    scalars = [one for one in args[:1] if isinstance(one, Tensor) and one.numel() == 1 and one.device.type == "cpu"]
    return float(scalars[0]) if scalars else None


@quiet
def _called(name: str, args: Any, before: float | None, after: float | None) -> None:
    found = [tensor for tensor in find_tensors(list(args)) if tensor.numel()]
    gaps = [list(tensor.stride()) for tensor in found if not torch.ops.aten.is_non_overlapping_and_dense(tensor)]
    places = {parameter.data_ptr(): number for number, parameter in tensors.alive().items()}
    parameter = next((places[tensor.data_ptr()] for tensor in found if tensor.data_ptr() in places), None)
    own = args[1] if name == "all_gather" and len(args) > 1 else None
    if isinstance(own, Tensor) and called_by_script():
        _gathered.append((args[0], own.requires_grad, where()))
    emit(
        "collective",
        name=name,
        before=before,
        after=after,
        gaps=gaps[:1],
        requires_grad=any(tensor.requires_grad and not tensor.is_leaf for tensor in found),
        parameter=parameter,
        in_backward=torch._C._current_graph_task_id() != -1,
        where=where(),
    )


@quiet
def _before_backward() -> None:
    for gathered, needed, line in _gathered:
        put_back = any(tensor.requires_grad for tensor in find_tensors(gathered))
        if needed or put_back:
            emit("put_back" if put_back else "without_gradient", where=line)
    _gathered.clear()
