"""The state of a sharded job: each rank writes its own part, and takes its part of what any other job has written.

No rank ever has more than its own part and, while it reads, one whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.training.models import persistent_buffers
from common.training.optimization import STATE_OF, Entry, local
from ddp.checkpoint.folder import Damaged, load, shard_keys
from ddp.checkpoint.shards import WEIGHT, Region, Saved, Shard, memory_order, open_shards, read, shard_content
from ddp.sharded.strategies import FullyShard
from ddp.sharded.zero1 import ZeRO1

NUMBER = Region(0, (), ())  # of a 0-d tensor


class Part(NamedTuple):
    """This rank's part of one parameter.

    :param parameter: what the optimizer has: a shard, a DTensor, or a whole parameter that is frozen
    :param replicated: every rank has it whole
    :param in_full: it is a shard in the memory of whole parameters
    """

    parameter: nn.Parameter
    region: Region
    replicated: bool = False
    in_full: bool = False


def layout_of(network: nn.Module) -> dict[str, Part]:
    """The parts of all parameters by name, in the order of the plain module's ``named_parameters()``.

    :param network: what :func:`ddp.sharded.strategies.shard_network` returned
    """
    return dict(_of_fully_shard(network) if isinstance(network, FullyShard) else _of_zero(network))


def _of_zero(network: nn.Module) -> Iterator[tuple[str, Part]]:
    assert isinstance(network, ZeRO1)
    parts: dict[str, Part] = {}
    for flat in network.flats:
        for name, shard, begin, like in zip(flat.owners, flat.sharded, flat.begins(), flat.like, strict=True):
            region = Region.of_whole(like)._replace(begin=begin)
            parts[name] = Part(shard, region, in_full=flat.shard_in_full)
    for name, parameter in network.module.named_parameters():
        if name in parts:
            yield name, parts[name]
        else:  # frozen, and whole up to stage 2
            yield name, Part(parameter, Region.of_whole(parameter), replicated=True)


def _of_fully_shard(network: FullyShard) -> Iterator[tuple[str, Part]]:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for part in network.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # the root stays whole after a forward pass without gradients
    for name, parameter in network.named_parameters():
        assert isinstance(parameter, DTensor)
        shape = tuple(parameter.shape)
        _, offset = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
        own = local(parameter)
        # A rank without rows is told that its part begins where the tensor ends.
        begin = offset[0] * (parameter.numel() // shape[0]) if own.numel() else 0
        yield name, Part(parameter, Region(begin, shape, tuple(range(len(shape)))))


def state_of_shard(
    network: nn.Module, optimizer: torch.optim.Optimizer, buffers: Mapping[str, Tensor], first: bool
) -> dict[str, Any]:
    """The content of this rank's file. Tensors are not copied, except for shards in the memory of whole parameters.

    :param network: what :func:`ddp.sharded.strategies.shard_network` returned
    :param buffers: of the plain module, by name
    :param first: whether this is rank 0, which writes also what all ranks have
    """
    shards: dict[str, Shard] = {}
    layout = layout_of(network)
    for name, part in layout.items():
        if first or not part.replicated:
            values = flat(part.parameter)
            # torch.save writes whole storages: without the copy, those of the whole parameters.
            shards[f"{WEIGHT}:{name}"] = Shard(values.clone() if part.in_full else values, part.region)
        for key, value in optimizer.state.get(part.parameter, {}).items():
            if value is None:
                continue
            if value.dim():
                shards[f"{key}:{name}"] = Shard(flat(value), part.region)
            elif first:  # Adam's count of steps, the same on every rank
                shards[f"{key}:{name}"] = Shard(value.view(1), NUMBER)
    if first:
        shards |= {f"{WEIGHT}:{name}": Shard.of_whole(value) for name, value in buffers.items()}
    return shard_content(shards, list(layout), _tied(network.get_submodule("module")))


def restore_shard(network: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Take this rank's part of the parameters and the optimizer's state from a verified checkpoint of any strategy.

    :param network: what :func:`ddp.sharded.strategies.shard_network` returned
    :raises Damaged: when it holds other tensors than this network's
    """
    layout, expected, plain = layout_of(network), STATE_OF[type(optimizer)], network.get_submodule("module")
    saved = open_shards(path).shards if shard_keys(path) else _open_whole(path, list(layout))
    buffers = dict(plain.named_buffers(remove_duplicate=False))
    known = {f"{kind}:{name}" for kind in (WEIGHT, *expected) for name in (*layout, *_tied(plain))}
    optimizer.state.clear()
    try:
        if unknown := sorted(saved.keys() - known - {f"{WEIGHT}:{name}" for name in buffers}):
            raise LookupError(f"has {unknown[0]}, which the run has not")
        for name in sorted(persistent_buffers(plain)):
            _fill(buffers[name], saved, f"{WEIGHT}:{name}", Region.of_whole(buffers[name]))
        for name, part in layout.items():
            _fill(part.parameter, saved, f"{WEIGHT}:{name}", part.region)
            if any(f"{key}:{name}" in saved for key in expected):  # not if it has never had a gradient
                optimizer.state[part.parameter] = _state_of(name, part, saved, expected)
    except LookupError as error:
        raise Damaged(path, str(error.args[0])) from error


def _state_of(name: str, part: Part, saved: Saved, expected: Mapping[str, Entry]) -> dict[str, Tensor]:
    """The optimizer's state for this rank's part of one parameter."""
    state: dict[str, Tensor] = {}
    for key, entry in expected.items():
        if entry.like_parameter:
            state[key] = torch.zeros_like(part.parameter, requires_grad=False)
            _fill(state[key], saved, f"{key}:{name}", part.region)
        else:  # fused optimizers want it on the parameter's device
            state[key] = torch.zeros((), device=part.parameter.device)
            _fill(state[key], saved, f"{key}:{name}", NUMBER)
    return state


def _fill(target: Tensor, saved: Saved, name: str, region: Region) -> None:
    """Copy this rank's part of a saved tensor into its memory.

    :raises LookupError: when there is none of this shape and dtype
    """
    memory = flat(target)
    values = read(name, saved.get(name, []), memory.numel(), region)
    if values.dtype != memory.dtype:
        raise LookupError(f"has {name} in {values.dtype} instead of {memory.dtype}")
    memory.copy_(values)


def _open_whole(path: Path, parameters: list[str]) -> Saved:
    """The files of a job of replicas, mapped, each tensor as one shard."""
    weights, optimizer = load(path, "model", mapped=True), load(path, "optimizer", mapped=True)
    try:
        saved = {f"{WEIGHT}:{name}": [Shard.of_whole(value)] for name, value in weights.items()}
        for number, state in optimizer["state"].items():
            for key, value in state.items():
                if value is not None:
                    saved[f"{key}:{parameters[number]}"] = [Shard.of_whole(value)]
    except (AttributeError, LookupError, TypeError) as error:  # of what is no dict, or no tensor
        raise Damaged(path, "model.pt or optimizer.pt holds something else than a run writes") from error
    return saved


def flat(tensor: Tensor) -> Tensor:
    """This rank's part as it lies in memory: ``[n]``, to be read or written."""
    own = local(tensor.detach())
    return own.permute(memory_order(own)).view(-1)


def _tied(module: nn.Module) -> dict[str, str]:
    """The further names of parameters that several modules hold, each with the first."""
    first: dict[nn.Parameter, str] = {}
    names = {name: first.setdefault(value, name) for name, value in module.named_parameters(remove_duplicate=False)}
    return {alias: name for alias, name in names.items() if alias != name}
