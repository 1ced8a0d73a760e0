"""Collectives that Python code calls: the script's own, or a library's. (DDP's reducer sums in C++ and is not seen here.)"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .event_types import Collective, CollectiveBegins, PutBack, WithoutGradient
from .events import Call, Look, called_by_script, emit, frames, in_backward, thread, watch, where
from .tensors import are_parameters, find_tensors

WORDS = ("reduce", "gather", "scatter", "broadcast", "all_to_all", "barrier")
# All that this torch has, by old and new names; the object reduce_op would warn if it were asked for its class.
NAMES = [
    name for name, value in vars(dist).items() if type(value) is FunctionType and any(word in name for word in WORDS)
]
MOST_VALUES = 64  # of a tensor that is written down: a metric, or a few
_gathered: list[tuple[Any, bool, str]] = []  # lists that an all_gather has filled with tensors that lead nowhere


@watch(dist, *NAMES)
def collective(call: Call) -> Look:
    """Those of FSDP are left out: they are parts of the model's passes."""
    name, arguments = call.function.__name__, [*call.args, *call.kwargs.values()]
    if any(str(frame.f_globals.get("__name__")).startswith("torch.distributed.fsdp") for frame in frames()):
        return
    own = call.get("tensor")
    size = f" (values: {own.numel():,})" if isinstance(own, Tensor) else ""
    if call.get("group") in (None, dist.group.WORLD):
        emit(CollectiveBegins(what=name + size))
    few = own if size and own.numel() <= MOST_VALUES and own.is_cpu else torch.empty(0)
    before = few.double().flatten().tolist()
    yield
    found = [tensor for tensor in find_tensors(arguments) if tensor.numel()]
    if name == "all_gather" and called_by_script() and not _in_autograd_function():  # which has its own backward pass
        needed = thread.gradients and own.requires_grad and own.numel() > 1  # one number is for a log
        _gathered.append((call.get("tensor_list"), needed, where()))
    event = Collective(
        name=name,
        before=before,
        after=few.double().flatten().tolist(),
        gaps=[one.stride() for one in found if not torch.ops.aten.is_non_overlapping_and_dense(one)],
        requires_grad=any(tensor.requires_grad and not tensor.is_leaf for tensor in found),
        sends_parameter=in_backward() and name == "all_reduce" and are_parameters(found),
    )
    emit(event)


def _in_autograd_function() -> bool:
    """Whether the forward or backward pass of an autograd function runs: its first argument is the context."""
    firsts = (frame.f_locals.get(next(iter(frame.f_code.co_varnames), "")) for frame in frames())
    return any(issubclass(type(one), FunctionCtx) for one in firsts)


@watch(torch.autograd, "backward")
def backward(call: Call) -> Look:
    for gathered, needed, line in _gathered:
        put_back = any(tensor.requires_grad for tensor in find_tensors(gathered))
        if needed or put_back:
            emit(PutBack(where=line) if put_back else WithoutGradient(where=line))
    _gathered.clear()
    yield
