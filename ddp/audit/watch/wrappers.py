"""Process groups, wrappers of models, and forward passes through them or around them."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from .events import called_by_script, detailed, directory, emit, gradients_enabled, is_below, quiet, watch, where
from .tensors import checksum, register, rows

_inside = threading.local()  # how many wrappers' forward passes are running
_seen: set[tuple[str, bool, bool]] = set()  # lines of the script that have been reported
# Layers that differ between training and evaluation.
_RANDOM = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)


def install() -> None:
    from torch.nn.parallel import DistributedDataParallel

    if dist.is_available():
        _watch_groups()
        _watch_ddp(DistributedDataParallel)


def _watch_groups() -> None:
    @watch(dist, "init_process_group")
    def init_process_group(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        _joined()
        return result

    dist.distributed_c10d.init_process_group = dist.init_process_group


@quiet
def _joined() -> None:
    rank = dist.get_rank()
    emit("group", rank=rank)
    stack = open(directory / f"{os.getpid()}.stack", "w")  # noqa: SIM115  it stays open
    stack.write(f"{rank}\n")
    stack.flush()
    faulthandler.register(signal.SIGUSR2, stack, all_threads=False)
    # gloo's threads free what the last backward pass has left there, our hooks among it; one that still does while Python shuts
    # down aborts the process.
    atexit.register(time.sleep, 0.3)


def _watch_ddp(ddp: Any) -> None:
    @watch(Join, "__enter__")
    def join(original: Any, self: Any) -> Any:
        emit("join", where=where())
        return original(self)

    @watch(ddp, "__init__")
    def wrap(original: Any, self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, module, *args, **kwargs)
        _wrapped(self, module)

    @watch(ddp, "forward")
    def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        _inside.depth = getattr(_inside, "depth", 0) + 1
        before = checksum(torch.get_rng_state())
        try:
            result = original(self, *args, **kwargs)
        finally:
            _inside.depth -= 1
        if torch.is_grad_enabled():
            _forward(self, [args, kwargs], None if before == checksum(torch.get_rng_state()) else before)
        return result

    @watch(ddp, "__setattr__")
    def assign(original: Any, self: Any, name: str, value: Any) -> None:
        if name == "require_backward_grad_sync" and called_by_script():
            emit("flag", where=where())
        original(self, name, value)


@quiet
def _wrapped(wrapper: Any, module: nn.Module) -> None:
    register(module.named_parameters())
    wrapper.__dict__["_audit_known"] = _hooked(module)
    wrapper.__dict__["_audit_layer"] = _random_layers(module)
    wrapper.__dict__["_audit_sync"] = any(isinstance(one, nn.SyncBatchNorm) for one in module.modules())
    for submodule in module.modules():
        submodule.register_forward_pre_hook(functools.partial(_before_forward, module))


@quiet
def _forward(wrapper: Any, inputs: Any, drawn_from: int | None) -> None:
    """Hooks are lost where a parameter is another object than when it was wrapped, or has another dtype or device.

    :param drawn_from: checksum of the generator from which the forward pass drew numbers, if it drew any
    """
    known, now = wrapper.__dict__["_audit_known"], _hooked(wrapper.module)
    emit(
        "forward",
        lost=any(known.get(parameter) != kind for parameter, kind in now.items()),
        rows=rows(inputs) if detailed() else [],
        drawn_from=drawn_from,
        training=wrapper.training,
        layer=wrapper.__dict__["_audit_layer"],
        synchronizes=wrapper.require_backward_grad_sync,
        synchronizes_batchnorm=wrapper.__dict__["_audit_sync"],
        where=where(),
    )


def _hooked(module: nn.Module) -> dict[str, tuple[int, str, str]]:
    return {name: (id(p), str(p.dtype), str(p.device)) for name, p in module.named_parameters() if p.requires_grad}


@quiet
def _before_forward(root: nn.Module, module: nn.Module, _: Any) -> None:
    """Of a module that a wrapper holds: training calls it through the wrapper, or around it; an evaluation may do either."""
    trains, is_inside = gradients_enabled(), getattr(_inside, "depth", 0) or torch._C._current_graph_task_id() != -1
    if is_inside and (trains or module is not root):  # activation checkpointing turns gradients off as well
        return
    kind = (where(), trains, module.training)
    if kind in _seen or (trains and not module.training) or is_below("torch.optim.swa_utils"):
        return  # update_bn must run in training mode
    _seen.add(kind)
    if trains:
        emit("around", where=kind[0])
    else:
        sums = [checksum(buffer) for buffer in root.buffers()]
        emit("evaluation", training=module.training, random=_random_layers(module), buffers=sums, where=kind[0])


def _random_layers(module: nn.Module) -> str | None:
    """The first layer that differs between training and evaluation."""
    layers = (one for one in module.modules() if isinstance(one, _RANDOM) and getattr(one, "p", True))
    return next((type(one).__name__ for one in layers), None)
