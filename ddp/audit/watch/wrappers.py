"""Process groups, wrappers of models, and forward passes through them or around them."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import time
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from .event_types import Around, Compiled, Evaluation, Flag, Forward, Group, JoinBegins, Names
from .events import (
    Call,
    Look,
    called_by_script,
    detailed,
    directory,
    emit,
    identity,
    in_backward,
    is_below,
    is_compiling,
    quiet,
    thread,
    watch,
    where,
)
from .tensors import checksum, number_of, rows

# Kept here and not in the script's objects, which it may save, copy and compile.
_wrapped = weakref.WeakKeyDictionary[DistributedDataParallel, dict[str, tuple[int, str, str]]]()
_roots = weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]]()  # of each submodule, the module that is wrapped
_seen: set[tuple[int, str, bool, bool]] = set()  # models, and lines of the script, that have been reported
# Layers that differ between training and evaluation.
_RANDOM = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)


@watch(dist.distributed_c10d, "init_process_group")
@watch(dist, "init_process_group")
@watch(dist.device_mesh, "init_process_group")
def init_process_group(call: Call) -> Look:
    stack = open(directory / f"{os.getpid()}.stack", "w")  # noqa: SIM115  it stays open
    stack.write(f"{call.get('rank', os.environ.get('RANK'))}\n")
    stack.flush()
    faulthandler.register(signal.SIGUSR2, stack, all_threads=False)
    yield
    emit(Group(rank=dist.get_rank()))
    # gloo's threads free what the last backward pass has left there, our hooks among it; one that still does while Python shuts
    # down aborts the process.
    atexit.register(time.sleep, 0.3)


@watch(torch, "compile")
def compiles(call: Call) -> Look:
    emit(Compiled())
    yield


@watch(Join, "__enter__")
def join(call: Call) -> Look:
    emit(JoinBegins())
    yield


@watch(DistributedDataParallel, "__init__", "__setstate__")  # the latter in a copy, and in one that is loaded
def wrap(call: Call) -> Look:
    yield
    wrapper = call.args[0]
    emit(Names(names={number_of(parameter): name for name, parameter in wrapper.module.named_parameters()}))
    _wrapped[wrapper] = _hooked(wrapper.module)
    for submodule in wrapper.module.modules():
        _roots[submodule] = weakref.ref(wrapper.module)


@watch(DistributedDataParallel, "__setattr__")
def assign(call: Call) -> Look:
    if call.args[1] == "require_backward_grad_sync" and called_by_script():
        emit(Flag())
    yield


@watch(DistributedDataParallel, "forward")
def forward(call: Call) -> Look:
    """Hooks are lost where a parameter is another object than when it was wrapped, or has another dtype or device."""
    before = checksum(torch.get_rng_state())
    yield
    if not thread.gradients:
        return
    wrapper, *inputs = call.args
    hooked = _hooked(wrapper.module)
    event = Forward(
        lost=not hooked.items() <= _wrapped.get(wrapper, hooked).items(),
        rows=rows([inputs, call.kwargs]) if detailed() else [],
        drawn_from=None if before == checksum(torch.get_rng_state()) else before,
        training=wrapper.module.training,  # Lightning sets no mode of the wrapper
        layer=_random_layer(wrapper),
        synchronizes=wrapper.require_backward_grad_sync,
        synchronizes_batchnorm=any(isinstance(one, nn.SyncBatchNorm) for one in wrapper.modules()),
    )
    emit(event)


def _hooked(module: nn.Module) -> dict[str, tuple[int, str, str]]:
    return {name: (id(p), str(p.dtype), str(p.device)) for name, p in module.named_parameters() if p.requires_grad}


def _before_any_forward(module: nn.Module, inputs: Any) -> None:
    if is_compiling():
        return
    root = _roots.get(module)
    if root is not None:
        _before_forward(root() or module, module)


@quiet()
def _before_forward(root: nn.Module, module: nn.Module) -> None:
    """Watch a module that a wrapper holds: training calls it through the wrapper, or around it; an evaluation may do either."""
    trains, is_inside = thread.gradients, forward in thread.running or in_backward()
    if is_inside and (trains or module is not root):  # activation checkpointing turns gradients off as well
        return
    kind = (identity(root), where(), trains, module.training)
    if kind in _seen or (trains and not module.training) or is_below("torch.optim.swa_utils"):
        return  # update_bn must run in training mode
    _seen.add(kind)
    if trains:
        emit(Around())
    else:
        sums = [checksum(buffer) for buffer in root.buffers()]
        emit(Evaluation(training=module.training, random=_random_layer(module), buffers=sums))


def _random_layer(module: nn.Module) -> str | None:
    """The first layer that differs between training and evaluation."""
    layers = (one for one in module.modules() if isinstance(one, _RANDOM) and getattr(one, "p", True))
    return next((type(one).__name__ for one in layers), None)


register_module_forward_pre_hook(_before_any_forward)
# It does nothing in a compiled module.
warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global hooks")
