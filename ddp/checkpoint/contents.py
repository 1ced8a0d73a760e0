"""Does what a checkpoint holds fit what it is loaded into? Asked before anything is loaded.

A digest finds what a disk has done to a file, but not what a person or another program has put there. A fused optimizer writes
over the end of a momentum buffer that is too short. So every name, shape, dtype and number is compared with the run's own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from common.files.run_directory import CHECKPOINT
from common.training.optimization import STATE_OF
from common.training.window import WindowState, WindowTotals

SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
PROGRESS = ("scaler", "windows", "skipped_steps", "accuracy", "best")


def wrong_progress(progress: Mapping[str, Any]) -> str | None:
    """The first thing in a manifest's ``progress`` that no run has written, or None."""
    if missing := [name for name in PROGRESS if name not in progress]:
        return f"has a progress without {', '.join(missing)}"
    scaler, windows, best = progress["scaler"], progress["windows"], progress["best"]
    fields = {field.name for field in dataclasses.fields(WindowTotals)}
    right = {
        "scaler": scaler == {} or (_has(scaler, set(SCALER)) and all(map(_is_number, scaler.values()))),
        "windows": isinstance(windows, list)
        and all(_has(window, fields) and all(map(_is_number, window.values())) for window in windows),
        "skipped_steps": type(progress["skipped_steps"]) is int and progress["skipped_steps"] >= 0,
        "accuracy": progress["accuracy"] is None or _is_share(progress["accuracy"]),
        "best": best is None
        or (_has(best, {"name", "accuracy"}) and _is_name(best["name"]) and _is_share(best["accuracy"])),
    }
    wrong = [name for name in PROGRESS if not right[name]]
    return f"has a progress whose {wrong[0]} is {_short(progress[wrong[0]])}" if wrong else None


def wrong_tensors(found: object, expected: Mapping[str, Tensor], *, shapes: bool = True) -> str | None:
    """The first difference between named tensors and those that they are loaded into, or None.

    :param shapes: whether other shapes are a difference
    """
    if not isinstance(found, dict):
        return f"is a {type(found).__name__}"
    for name in [*expected, *found]:
        if name not in found:
            return f"lacks {name}"
        if name not in expected:
            return f"has {_short(name)}, which the model has not"
        if problem := _unlike(found[name], expected[name], shapes):
            return f"has {name} as {problem}"
    return None


def wrong_optimizer(found: dict[str, Any], optimizer: torch.optim.Optimizer, may_be_empty: bool) -> str | None:
    """The first difference between an optimizer's state and what this one could have saved, or None.

    :param may_be_empty: whether it may have kept nothing yet: SGD without momentum, or a run whose steps were all skipped
    """
    own = optimizer.state_dict()
    if found.keys() != own.keys():
        return f"holds {_short(sorted(map(str, found)))} instead of {sorted(own)}"
    groups, states = found["param_groups"], found["state"]
    if not (isinstance(groups, list) and all(isinstance(group, dict) for group in groups)):
        return "has param_groups that are no list of dicts"
    numbers = [group.get("params") for group in groups]
    if not all(isinstance(own, list) and all(type(number) is int for number in own) for own in numbers) or (
        numbers != [group["params"] for group in own["param_groups"]]
    ):
        return "has the parameters of another model"
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    if not isinstance(states, dict) or states.keys() - parameters.keys():
        return "has a state of parameters that the model has not"
    expected = STATE_OF[type(optimizer)]
    for number, state in states.items():
        if not isinstance(state, dict) or state.keys() - expected.keys():
            return f"has the state {_short(state)} for parameter {number}"
        if state and state.keys() != expected.keys():
            return f"lacks {', '.join(sorted(expected.keys() - state.keys()))} of parameter {number}"
        for name, value in state.items():
            if value is None and expected[name].may_be_none:
                continue
            like = parameters[number] if expected[name].like_parameter else torch.zeros(())
            if problem := _unlike(value, like):
                return f"has {name} of parameter {number} as {problem}"
    # DDP gives each of them a gradient in every step, so they have all been updated or none.
    trained = [number for number, parameter in parameters.items() if parameter.requires_grad]
    lacking = [number for number in trained if all(value is None for value in states.get(number, {}).values())]
    if lacking and not (may_be_empty and lacking == trained):
        return f"lacks the state of parameter {lacking[0]}"
    return None


def wrong_ranks(found: list[Any], world_size: int, network: nn.Module) -> str | None:
    """The first thing that no rank of this run has saved, or None."""
    if len(found) != world_size:
        return f"has {len(found)} ranks instead of {world_size}"
    buffers = dict(network.named_buffers())
    for rank, state in enumerate(found):
        if not _has(state, {"buffers", "window"}):
            return f"has {_short(state)} for rank {rank}"
        if problem := wrong_tensors(state["buffers"], buffers):
            return f"{problem}, for rank {rank}"
        window = state["window"]
        if not (isinstance(window, tuple) and len(window) == len(WindowState._fields) and all(map(_is_number, window))):
            return f"has the window {_short(window)} for rank {rank}"
    return None


def _unlike(found: object, expected: Tensor, shapes: bool = True) -> str | None:
    if not isinstance(found, Tensor):
        return f"a {type(found).__name__}"
    if found.layout != torch.strided or torch.empty_like(found).stride() != found.stride():
        return "a tensor whose elements are not all in memory, once each"
    if found.dtype != expected.dtype or (shapes and found.shape != expected.shape):
        ours, theirs = (f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in (expected, found))
        return f"{theirs} instead of {ours}"
    return None


def _has(value: object, names: set[str]) -> bool:
    return isinstance(value, dict) and value.keys() == names


def _is_name(value: object) -> bool:
    """Whether it is a checkpoint's name, and no path to somewhere else."""
    return isinstance(value, str) and re.fullmatch(CHECKPOINT, value, re.ASCII) is not None


def _is_share(value: Any) -> bool:
    return _is_number(value) and bool(0 <= value <= 1)


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:60]}..."
