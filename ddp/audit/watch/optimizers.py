"""Optimizer steps, learning-rate schedules, gradient clipping, and the scaler and autocast of mixed precision."""

from __future__ import annotations

import inspect
import os
import signal
import traceback
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import events, tensors
from .events import detailed, emit, quiet, watch, where
from .gradients import watch_parameters

KILL_AT = int(os.environ.get("DDP_AUDIT_KILL_AT", 0))
_scaling = 0  # how many of the scaler's own steps are running
_dtypes: set[torch.dtype] = set()  # of autocast
_scheduling = 0  # how many schedules' constructors and steps are running


def install() -> None:
    _watch_optimizers()
    _watch_schedules()
    _watch_clipping()
    _watch_precision()


def _watch_optimizers() -> None:
    @watch(torch.optim.Optimizer, "add_param_group")
    def add_param_group(original: Any, self: Any, group: Any) -> Any:
        result = original(self, group)
        _adopt(self)
        return result

    @watch(torch.optim.Optimizer, "zero_grad")
    def zero_grad(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        emit("zero_grad", where=where())
        return original(self, *args, **kwargs)

    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@quiet
def _adopt(optimizer: Any) -> None:
    tensors.register(("", parameter) for group in optimizer.param_groups for parameter in group["params"])
    watch_parameters()


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@quiet
def _before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """A closure computes the gradients within the step, so they are looked at when it ends."""
    if _makes_state():
        return None
    closure = kwargs.get("closure") or next(iter(args[1:]), None)
    if closure is None:
        return _look(optimizer)

    def closure_and_look() -> Any:
        result = closure()
        _look(optimizer)
        return result

    return args[:1], {**kwargs, "closure": closure_and_look}


@quiet
def _look(optimizer: Any) -> None:
    own = tensors.register(("", parameter) for parameter in _parameters(optimizer))
    fields: dict[str, Any] = {"scaler": _scaling > 0, "where": where()}
    fields["rates"] = [float(group["lr"]) for group in optimizer.param_groups]
    fields["without_gradient"] = [
        n for n, p in zip(own, _parameters(optimizer), strict=True) if p.requires_grad and p.grad is None
    ]
    if detailed():
        fields |= {"gradients": tensors.gradient_probes(), "parameters": _sums(optimizer, own)}
    emit("before_step", own=own, **fields)


def _makes_state() -> bool:
    """Whether torch/distributed/checkpoint/state_dict.py calls: it makes the state to load into by a step that changes nothing."""
    return any(frame.f_code.co_name == "_init_optim_state" for frame, _ in traceback.walk_stack(None))


@quiet
def _after_step(optimizer: Any, *_: Any) -> None:
    if _makes_state():
        return
    own = tensors.register(("", parameter) for parameter in _parameters(optimizer))
    sharded = any(map(tensors.is_shard, _parameters(optimizer)))
    sums = _sums(optimizer, own) if detailed() else None
    emit("step", parameters=sums, sharded=sharded)
    events.steps += 1
    if events.steps == KILL_AT:
        os.kill(os.getpid(), signal.SIGKILL)


def _sums(optimizer: Any, own: list[int]) -> dict[int, int]:
    return dict(zip(own, map(tensors.checksum, _parameters(optimizer)), strict=True))


def _watch_schedules() -> None:
    base = torch.optim.lr_scheduler.LRScheduler
    for schedule in list(vars(torch.optim.lr_scheduler).values()):
        if isinstance(schedule, type) and issubclass(schedule, base):
            for name in vars(schedule).keys() & {"__init__", "step"}:
                _watch_schedule(schedule, name)
    for name in ("__init__", "update_parameters"):
        _watch_schedule(torch.optim.swa_utils.AveragedModel, name)


def _watch_schedule(schedule: Any, name: str) -> None:
    @watch(schedule, name)
    def call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        global _scheduling
        _scheduling += 1
        try:
            result = original(self, *args, **kwargs)
        finally:
            _scheduling -= 1
        if not _scheduling:  # SequentialLR calls the steps of others, and each constructor takes a step
            metric = args[0] if args and name == "step" else kwargs.get("metrics")
            of = getattr(self, "optimizer", self)  # an average of weights has none
            made = "average_made" if of is self else "schedule_made"
            fields = {"metric": None if metric is None else float(metric), "optimizer": id(of)}
            kind = {"step": "schedule", "update_parameters": "average"}.get(name, made)
            emit(kind, schedule=type(self).__name__, id=id(self), where=where(), **fields)
        return result


def _watch_clipping() -> None:
    for name in ("clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_"):
        _watch_clip(name)


def _watch_clip(name: str) -> None:
    @watch(nn.utils, name)
    def clip(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        _clipped(given.get("max_norm"), given.get("total_norm", result))
        return result


@quiet
def _clipped(limit: Any, norm: Any) -> None:
    """:param limit: of the norm; None where each element is clipped, and infinite where the script only asks for the norm"""
    if limit is None or float(limit) < float("inf"):
        known = norm is not None and not hasattr(norm, "_local_tensor")  # the norm of a DTensor would need a collective
        emit("clip", norm=float(norm) if known else None, limit=limit and float(limit), where=where())


def _watch_precision() -> None:
    scaler = torch.amp.grad_scaler.GradScaler

    @watch(torch.amp.autocast_mode.autocast, "__enter__")
    def autocast(original: Any, self: Any) -> Any:
        if self._enabled and self.fast_dtype not in _dtypes:
            _dtypes.add(self.fast_dtype)
            emit("autocast", eps=torch.finfo(self.fast_dtype).eps)
        return original(self)

    @watch(scaler, "scale")
    def scale(original: Any, self: Any, outputs: Any) -> Any:
        if self.is_enabled():
            result = original(self, outputs)
            emit("scale", scale=float(self.get_scale()), where=where())
            return result
        return original(self, outputs)

    @watch(scaler, "unscale_")
    def unscale_(original: Any, self: Any, *args: Any) -> Any:
        if self.is_enabled():
            emit("unscale", where=where())
        return original(self, *args)

    @watch(scaler, "step")
    def step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        global _scaling
        _scaling += self.is_enabled()
        before = events.steps
        try:
            result = original(self, *args, **kwargs)
        finally:
            _scaling -= self.is_enabled()
        if self.is_enabled() and events.steps == before:
            emit("skipped", where=where())
        return result
