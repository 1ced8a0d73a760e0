"""Optimizer steps, learning-rate schedules, gradient clipping, and the scaler and autocast of mixed precision."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import events
from .event_types import (
    Autocast,
    BeforeStep,
    Checksums,
    Clip,
    Scale,
    Schedule,
    ScheduleMade,
    Skipped,
    Stepped,
    Unscale,
)
from .events import Call, Look, detailed, emit, identity, is_below, quiet, thread, watch
from .gradients import gradient_probes, watch_parameters
from .randomness import draws, of_main_process
from .tensors import checksum, is_shard, known, number_of

KILL_AT = int(os.environ.get("DDP_AUDIT_KILL_AT", 0))
# torch/distributed/checkpoint/state_dict.py makes the state to load into by a step that changes nothing.
MAKES_STATE = "_init_optim_state"


@watch(torch.optim.Optimizer, "add_param_group")
def add_param_group(call: Call) -> Look:
    yield
    _parameters(call.args[0])
    watch_parameters()


def _parameters(optimizer: Any) -> dict[str, Tensor]:
    """The optimizer's parameters by number."""
    return {number_of(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}


@quiet()
def _before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """A closure computes the gradients within the step, so they are looked at when it ends."""
    closure = kwargs.get("closure") or next(iter(args[1:]), None)
    if closure is None:
        return _look(optimizer)

    def closure_and_look() -> Any:
        result = closure()
        _look(optimizer)
        return result

    return args[:1], {**kwargs, "closure": closure_and_look}


@quiet()
def _look(optimizer: Any) -> None:
    if is_below(MAKES_STATE):
        return
    own = _parameters(optimizer)
    event = BeforeStep(
        own=list(own),
        scaler=step in thread.running,
        rates=[float(group["lr"]) for group in optimizer.param_groups],
        without_gradient=[n for n, p in own.items() if p.requires_grad and p.grad is None],
        gradients=gradient_probes() if detailed() else {},
        draws=draws(),
        generators=of_main_process(),
        parameters=_checksums(own) if detailed() else None,
    )
    emit(event)


@quiet()
def _after_step(optimizer: Any, *_: Any) -> None:
    if is_below(MAKES_STATE):
        return
    own = _parameters(optimizer)
    emit(Stepped(parameters=_checksums(own) if detailed() else None, sharded=any(map(is_shard, own.values()))))
    events.steps += 1
    if events.steps == KILL_AT:
        os.kill(os.getpid(), signal.SIGKILL)


def _checksums(parameters: dict[str, Tensor]) -> Checksums:
    return {number: checksum(parameter) for number, parameter in parameters.items()}


def schedule(call: Call) -> Look:
    """A schedule is made, or takes a step."""
    yield
    if schedule not in thread.running:  # SequentialLR calls the steps of others, and each constructor takes a step
        of, metric = call.args[0], call.get("metrics")
        event = (Schedule, ScheduleMade)[call.function.__name__ == "__init__"](
            name=type(of).__name__,
            id=identity(of),
            optimizer=identity(of.optimizer),
            metric=None if metric is None else float(metric),
            of_processes=is_below("accelerate.scheduler"),
        )
        emit(event)


for scheduler in (LRScheduler, *LRScheduler.__subclasses__()):
    watch(scheduler, *vars(scheduler).keys() & {"__init__", "step"})(schedule)


@watch(nn.utils, "clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_")
def clip(call: Call) -> Look:
    """The limit is None where each element is clipped, and infinite where the script only asks for the norm."""
    given = call.get("parameters")
    given = [given] if isinstance(given, Tensor) else given if isinstance(given, list) else []
    yield
    limit, norm = call.get("max_norm"), call.get("total_norm", call.result)
    if limit is None or limit < float("inf"):
        is_known = not hasattr(norm, "_local_tensor")  # the norm of a DTensor would need a collective
        norm = None if norm is None or not is_known else float(norm)
        emit(Clip(parameters=known(given), norm=norm, limit=limit and float(limit)))


@watch(torch.amp.autocast_mode.autocast, "__enter__")
def autocast(call: Call) -> Look:
    context = call.args[0]
    if context._enabled:
        emit(Autocast(eps=torch.finfo(context.fast_dtype).eps))
    yield


@watch(GradScaler, "scale", "unscale_")
def scale(call: Call) -> Look:
    yield
    scaler = call.args[0]
    if scaler.is_enabled():
        is_scale = call.function.__name__ == "scale"
        emit(
            Scale(scale=scaler.get_scale())
            if is_scale
            else Unscale(parameters=list(_parameters(call.get("optimizer"))))
        )


@watch(GradScaler, "step")
def step(call: Call) -> Look:
    steps = events.steps
    yield
    if call.args[0].is_enabled() and events.steps == steps:
        emit(Skipped())


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
