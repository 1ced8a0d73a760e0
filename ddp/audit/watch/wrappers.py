"""Process groups, wrappers of models, and forward passes through them or around them."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from .events import called_by_script, directory, emit, frames, gradients_enabled, quiet, watch, where
from .tensors import register

_inside = threading.local()  # how many wrappers' forward passes are running
_seen: set[tuple[str, bool]] = set()  # lines of the script that have been reported
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
        if torch.is_grad_enabled():
            _forward(self)
        _inside.depth = getattr(_inside, "depth", 0) + 1
        try:
            return original(self, *args, **kwargs)
        finally:
            _inside.depth -= 1

    @watch(ddp, "__setattr__")
    def assign(original: Any, self: Any, name: str, value: Any) -> None:
        if name == "require_backward_grad_sync" and called_by_script():
            emit("flag", where=where())
        original(self, name, value)


@quiet
def _wrapped(wrapper: Any, module: nn.Module) -> None:
    register(module.named_parameters())
    wrapper.__dict__["_audit_known"] = _hooked(module)
    for submodule in module.modules():
        submodule.register_forward_pre_hook(_before_forward)
    module.register_forward_pre_hook(_before_evaluation)


@quiet
def _forward(wrapper: Any) -> None:
    """Hooks are lost where a parameter is another object than when it was wrapped, or has another dtype or device."""
    known = wrapper.__dict__.get("_audit_known", {})
    now = _hooked(wrapper.module)
    emit("forward", lost=any(known.get(parameter, kind) != kind for parameter, kind in now.items()), where=where())


def _hooked(module: nn.Module) -> dict[str, tuple[int, str, str]]:
    return {name: (id(p), str(p.dtype), str(p.device)) for name, p in module.named_parameters() if p.requires_grad}


@quiet
def _before_forward(module: nn.Module, _: Any) -> None:
    """Of a module that a wrapper holds: it is called by the wrapper, or around it."""
    if getattr(_inside, "depth", 0) or torch._C._current_graph_task_id() != -1 or not gradients_enabled():
        return
    line = where()
    if module.training and (line, True) not in _seen:
        _seen.add((line, True))
        emit("around", where=line)


@quiet
def _before_evaluation(module: nn.Module, _: Any) -> None:
    if gradients_enabled() or "swa_utils" in {
        frame.f_globals.get("__name__", "").rpartition(".")[2] for frame in frames()
    }:
        return  # update_bn must run in training mode
    line = where()
    if (line, module.training) not in _seen:
        _seen.add((line, module.training))
        random = [type(one).__name__ for one in module.modules() if isinstance(one, _RANDOM)]
        emit("evaluation", training=module.training, random=random[:1], where=line)
