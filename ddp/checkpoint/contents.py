"""The comparison of a checkpoint's tensors with those that they are loaded into, before anything is loaded.

A digest finds changes that a disk makes to a file, but not that the file is another model's. A fused optimizer writes over the end
of a momentum buffer that is too short. So every name, shape and dtype is compared with the run's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from common.training.optimization import STATE_OF


def wrong_tensors(saved: Mapping[str, Any], expected: Mapping[str, Tensor]) -> str | None:
    """The first difference between named tensors and those that they are loaded into, or None."""
    for name in [*expected, *saved]:
        if name not in saved:
            return f"lacks {name}"
        if name not in expected:
            return f"has {name!r}, which the model has not"
        if problem := _unlike(saved[name], expected[name]):
            return f"has {name} as {problem}"
    return None


def wrong_optimizer(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, may_be_empty: bool) -> str | None:
    """The first difference between an optimizer's state and what this one could have saved, or None.

    :param may_be_empty: whether it may have kept nothing yet: SGD without momentum, or a run whose steps were all skipped
    """
    states, expected = saved.get("state", {}), STATE_OF[type(optimizer)]
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    if states.keys() - parameters.keys():
        return "has a state of parameters that the model has not"
    for number, state in states.items():
        if state and state.keys() != expected.keys():
            return f"has {', '.join(sorted(state))} of parameter {number} instead of {', '.join(sorted(expected))}"
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


def _unlike(saved: object, expected: Tensor) -> str | None:
    if not isinstance(saved, Tensor):
        return f"a {type(saved).__name__}"
    if saved.layout != torch.strided or torch.empty_like(saved).stride() != saved.stride():
        return "a tensor whose elements are not all in memory, once each"
    if saved.dtype != expected.dtype or saved.shape != expected.shape:
        ours, theirs = (f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in (expected, saved))
        return f"{theirs} instead of {ours}"
    return None
