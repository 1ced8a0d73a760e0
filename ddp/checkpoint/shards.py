"""Tensors in shards: how the ranks of a sharded job share out a checkpoint, and any other number of ranks reads it.

    rank-0-of-2.pt     | w1 begin 0 .... | b1 begin 0 | w2 begin 0 .. |
    rank-1-of-2.pt                                    | w2 begin 700 ....... | b2 begin 0 |

A *shard* is a run of consecutive elements of a tensor, in the order in which they lie in memory. All layouts in use are made of
such runs: parts of flat parameters (ZeRO), rows along the first dimension (``fully_shard``), and whole tensors (replicas).
So a reader needs to know where each shard begins, and nothing about its writer.

Files are mapped, not read: only the elements that a rank takes come into its memory. Shapes and dtypes are compared with the run's own
before anything is copied: a fused optimizer would write over the end of a momentum buffer that is too short.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.training.optimization import STATE_OF, local
from ddp.checkpoint.folder import Damaged, load

WEIGHT = "model"  # tensors are named "model:NAME" and, after the optimizer's own words, "exp_avg:NAME"


class Region(NamedTuple):
    """Where a shard lies in its tensor.

    :param begin: of its first element, in memory order
    :param shape: of the whole tensor
    :param order: the tensor's dimensions, from the slowest to the fastest in memory; channels-last is ``(0, 2, 3, 1)``
    """

    begin: int
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of_whole(cls, tensor: Tensor) -> Region:
        """The region of a whole tensor that has no gaps."""
        return cls(0, tuple(tensor.shape), memory_order(tensor))


class SavedShard(NamedTuple):
    """A shard in memory, or in a mapped file: its values ``[n]``, of any dtype."""

    values: Tensor
    region: Region

    @classmethod
    def of_whole(cls, tensor: Tensor) -> SavedShard:
        """A whole tensor as one shard. It is copied only if it has gaps."""
        return cls(in_memory_order(tensor, memory_order(tensor)), Region.of_whole(tensor))


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


class SavedTensors(NamedTuple):
    """The weights and the optimizer's state in a verified checkpoint.

    :param shards: of each tensor, by its name
    """

    path: Path
    shards: Mapping[str, Sequence[SavedShard]]

    def read(self, name: str, numel: int, region: Region) -> Tensor:
        """The ``numel`` elements of a tensor at this region, ``[numel]``.

        If they were saved in another memory order, the whole tensor is put together first.

        :raises Damaged: when it is lacking, has another shape, or its shards are not those of one tensor
        """
        shards = sorted(self.shards.get(name, ()), key=lambda shard: shard.region.begin)
        if problem := _wrong_shards(shards, region.shape):
            raise Damaged(self.path, f"has {name} {problem}")
        begin, end = region.begin, region.begin + numel
        if shards[0].region.order != region.order:
            return in_memory_order(self.whole(name), region.order)[begin:end]
        found = [
            values[max(0, begin - own.begin) : max(0, end - own.begin)]
            for values, own in shards
            if own.begin < end and begin < own.begin + values.numel()
        ]
        return torch.cat(found) if found else shards[0].values[:0]

    def whole(self, name: str) -> Tensor:
        """A whole tensor, laid out in memory as it was saved.

        :raises Damaged: as :meth:`read`
        """
        _, shape, order = self.shards[name][0].region
        flat = self.read(name, torch.Size(shape).numel(), Region(0, shape, order))
        back = sorted(range(len(order)), key=order.__getitem__)
        return flat.view([shape[dim] for dim in order]).permute(back)

    def fill(self, target: Tensor, name: str, region: Region) -> None:
        """Copy this rank's part of a tensor into its memory.

        :raises Damaged: as :meth:`read`, and for another dtype
        """
        memory = memory_of(target)
        values = self.read(name, memory.numel(), region)
        if values.dtype != memory.dtype:
            raise Damaged(self.path, f"has {name} in {values.dtype} instead of {memory.dtype}")
        memory.copy_(values)


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions from the slowest to the fastest."""
    return tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def in_memory_order(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """All elements ``[n]`` with the dimensions in this order; a view if they lie so."""
    return tensor.permute(order).reshape(-1)


def memory_of(tensor: Tensor) -> Tensor:
    """This rank's part as it lies in memory: ``[n]``, to be read or written."""
    own = local(tensor.detach())
    return own.permute(memory_order(own)).view(-1)


def shard_content(shards: Mapping[str, SavedShard], parameters: list[str], tied: dict[str, str]) -> dict[str, Any]:
    """The content of one rank's file, in the types that ``torch.load(weights_only=True)`` reads.

    :param parameters: the names of the model's parameters, in the order in which an optimizer numbers them
    :param tied: for each further name of a parameter that several modules hold, its first
    """
    packed = {name: (values, *region) for name, (values, region) in shards.items()}
    return {"shards": packed, "parameters": parameters, "tied": tied}


def shard_keys(path: Path) -> list[str]:
    """The entries of a checkpoint that hold shards, one of each rank that wrote it; none if it is not sharded."""
    return [file.stem for file in sorted(path.glob("rank-*-of-*.pt"))]


def open_tensors(path: Path, parameters: Sequence[str]) -> SavedTensors:
    """All tensors of a verified checkpoint of any strategy, mapped from its files; each tensor of replicas is one shard.

    :param parameters: the names of the model's parameters, in the order in which an optimizer numbers them
    """
    shards: dict[str, list[SavedShard]] = {}
    for key in shard_keys(path):
        for name, (values, *region) in load(path, key, mapped=True)["shards"].items():
            shards.setdefault(name, []).append(SavedShard(values, Region(*region)))
    if not shards:
        weights, optimizer = load(path, "model", mapped=True), load(path, "optimizer", mapped=True)
        tensors = {f"{WEIGHT}:{name}": value for name, value in weights.items()}
        for number, state in optimizer["state"].items():
            named = {f"{key}:{parameters[number]}": value for key, value in state.items()}
            tensors |= {name: value for name, value in named.items() if value is not None}
        shards = {name: [SavedShard.of_whole(value)] for name, value in tensors.items()}
    return SavedTensors(path, shards)


def whole_weights(path: Path) -> dict[str, Tensor]:
    """The state dict of the plain module, put together from a verified sharded checkpoint.

    :raises Damaged: when the shards are not those of whole tensors
    """
    saved = open_tensors(path, ())
    kinds = {name: name.partition(":") for name in saved.shards}
    weights = {short: saved.whole(name) for name, (kind, _, short) in kinds.items() if kind == WEIGHT}
    tied: dict[str, str] = load(path, shard_keys(path)[0], mapped=True)["tied"]
    return weights | {alias: weights[name] for alias, name in tied.items()}


def restore_optimizer(
    optimizer: torch.optim.Optimizer, parts: Mapping[str, Part], saved: SavedTensors, weights: Iterable[str]
) -> None:
    """Take this rank's part of the optimizer's state. A parameter that has never had a gradient has none.

    :param weights: names of the parameters and buffers that may be saved too
    :raises Damaged: when the state, or a weight, is not of this model and optimizer
    """
    known = {f"{WEIGHT}:{name}" for name in weights}
    known |= {f"{key}:{name}" for key in STATE_OF[type(optimizer)] for name in parts}
    if unknown := sorted(saved.shards.keys() - known):
        raise Damaged(saved.path, f"has {unknown[0]}, which the run has not")
    optimizer.state.clear()
    for name, part in parts.items():
        state = new_state(optimizer, part.parameter)
        if any(f"{key}:{name}" in saved.shards for key in state):
            optimizer.state[part.parameter] = state
            for key, value in state.items():
                saved.fill(value, f"{key}:{name}", part.region if value.dim() else Region.of_whole(value))


def new_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Zeros for the optimizer's state of one parameter, all of them on its device, where fused optimizers want them."""
    return {
        key: torch.zeros_like(parameter, requires_grad=False)
        if like_parameter
        else torch.zeros((), device=parameter.device)
        for key, like_parameter in STATE_OF[type(optimizer)].items()
    }


def _wrong_shards(shards: Sequence[SavedShard], shape: tuple[int, ...]) -> str | None:
    """The first thing that is wrong with the shards of a tensor that should have this shape, or None.

    :param shards: sorted by where they begin
    """
    if not shards:
        return "nowhere"
    values, (_, saved_shape, order) = shards[0]
    if saved_shape != shape:
        return f"of shape {list(saved_shape)} instead of {list(shape)}"
    at = 0
    for part, region in shards:
        if region[1:] != (shape, order) or part.dtype != values.dtype or (part.numel() and region.begin != at):
            return f"in shards that do not fit together at element {at}"
        at += part.numel()
    return None if at == torch.Size(shape).numel() else f"in shards of {at} elements"
