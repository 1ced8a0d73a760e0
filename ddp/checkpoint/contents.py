"""The tensors of a checkpoint, compared with those that they are loaded into, before anything is loaded.

A digest finds changes that a disk makes to a file, but not that the file is another model's. A fused optimizer writes over the end
of a momentum buffer that is too short. So every name, shape and dtype is compared with the run's own.

The weights of replicas are a state dict. All else is read as shards (shards.py), whatever strategy has written it: each rank takes the
part that is its own, which for replicas is the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.training.optimization import STATE_OF, local
from ddp.checkpoint.folder import Damaged, load, shard_keys
from ddp.checkpoint.shards import WEIGHT, Region, Saved, Shard, memory_order, open_shards, read

NUMBER = Region(0, (), ())  # of a 0-d tensor


class Part(NamedTuple):
    """This rank's part of one parameter.

    :param parameter: what the optimizer has: a shard, a DTensor, or a whole parameter
    :param replicated: every rank has it whole
    :param in_full: it is a shard in the memory of whole parameters
    """

    parameter: nn.Parameter
    region: Region
    replicated: bool = False
    in_full: bool = False


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


def open_tensors(path: Path, parameters: list[str]) -> Saved:
    """All tensors of a verified checkpoint, mapped from its files; of replicas, each is one shard.

    :param parameters: the names of the model's parameters, in the order in which an optimizer numbers them
    :raises Damaged: when a file holds something else than a run writes
    """
    if shard_keys(path):
        return open_shards(path).shards
    weights, optimizer = load(path, "model", mapped=True), load(path, "optimizer", mapped=True)
    names = dict(enumerate(parameters))
    try:
        tensors = {f"{WEIGHT}:{name}": value for name, value in weights.items()}
        for number, state in optimizer["state"].items():
            name = names[number]
            tensors |= {f"{key}:{name}": value for key, value in state.items() if value is not None}
        if gaps := [name for name, value in tensors.items() if not _is_dense(value)]:
            raise Damaged(path, f"has {gaps[0]} as a tensor whose elements are not all in memory, once each")
    except (AttributeError, LookupError, TypeError) as error:  # of what is no dict, or no tensor
        raise Damaged(path, "model.pt or optimizer.pt holds something else than a run writes") from error
    return {name: [Shard.of_whole(value)] for name, value in tensors.items()}


def restore_state(
    optimizer: torch.optim.Optimizer, parts: Mapping[str, Part], saved: Saved, weights: Iterable[str]
) -> None:
    """Take this rank's part of the optimizer's state. A parameter that has never had a gradient has none.

    :param weights: names of the parameters and buffers that may be saved too
    :raises LookupError: when the state, or a weight, is not of this model and optimizer
    """
    known = {f"{WEIGHT}:{name}" for name in weights}
    known |= {f"{key}:{name}" for key in STATE_OF[type(optimizer)] for name in parts}
    if unknown := sorted(saved.keys() - known):
        raise LookupError(f"has {unknown[0]}, which the run has not")
    for name, part in parts.items():
        state = new_state(optimizer, part.parameter)
        if any(f"{key}:{name}" in saved for key in state):
            optimizer.state[part.parameter] = state
            for key, value in state.items():
                fill(value, saved, f"{key}:{name}", part.region if value.dim() else NUMBER)


def new_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Zeros for the optimizer's state of one parameter, all of them on its device, where fused optimizers want them."""
    return {
        key: torch.zeros_like(parameter, requires_grad=False)
        if like_parameter
        else torch.zeros((), device=parameter.device)
        for key, like_parameter in STATE_OF[type(optimizer)].items()
    }


def fill(target: Tensor, saved: Saved, name: str, region: Region) -> None:
    """Copy this rank's part of a saved tensor into its memory.

    :raises LookupError: when there is none of this shape and dtype
    """
    memory = memory_of(target)
    values = read(name, saved.get(name, []), memory.numel(), region)
    if values.dtype != memory.dtype:
        raise LookupError(f"has {name} in {values.dtype} instead of {memory.dtype}")
    memory.copy_(values)


def memory_of(tensor: Tensor) -> Tensor:
    """This rank's part as it lies in memory: ``[n]``, to be read or written."""
    own = local(tensor.detach())
    return own.permute(memory_order(own)).view(-1)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements are all in memory, once each."""
    return tensor.layout == torch.strided and torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _unlike(saved: object, expected: Tensor) -> str | None:
    if not isinstance(saved, Tensor):
        return f"a {type(saved).__name__}"
    if not _is_dense(saved):
        return "a tensor whose elements are not all in memory, once each"
    if saved.dtype != expected.dtype or saved.shape != expected.shape:
        ours, theirs = (f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in (expected, saved))
        return f"{theirs} instead of {ours}"
    return None
