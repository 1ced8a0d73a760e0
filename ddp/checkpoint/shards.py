"""Tensors in shards: how the ranks of a sharded job share out a checkpoint, and any other number of ranks reads it.

    rank-0-of-2.pt     | w1 begin 0 .... | b1 begin 0 | w2 begin 0 .. |
    rank-1-of-2.pt                                    | w2 begin 700 ....... | b2 begin 0 |

A *shard* is a run of consecutive elements of a tensor, in the order in which they lie in memory. All layouts in use are made of
such runs: parts of flat parameters (ZeRO), rows along the first dimension (``fully_shard``), and whole tensors (replicas).
So a reader needs to know where each shard begins, and nothing about its writer.

Files are mapped, not read: only the elements that a rank takes come into its memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.dist_env import DistEnv
from common.errors import UsageError
from common.files.run_directory import writing
from ddp.checkpoint import directory, folder
from ddp.checkpoint.folder import Damaged

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


class Shard(NamedTuple):
    """A shard in memory, or in a mapped file: its values ``[n]``, of any dtype."""

    values: Tensor
    region: Region

    @classmethod
    def of_whole(cls, tensor: Tensor) -> Shard:
        """A whole tensor as one shard. It is copied only if it has gaps."""
        return cls(in_memory_order(tensor, memory_order(tensor)), Region.of_whole(tensor))


Saved = dict[str, list[Shard]]  # the shards of each tensor, by its name


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions from the slowest to the fastest."""
    return tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def in_memory_order(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """All elements ``[n]`` with the dimensions in this order; a view if they lie so."""
    return tensor.permute(order).reshape(-1)


def read(name: str, shards: Sequence[Shard], numel: int, region: Region) -> Tensor:
    """The ``numel`` elements at this region, ``[numel]``.

    :param shards: of the whole tensor. If they are in another memory order, the whole tensor is put together first
    :raises LookupError: when they are not the shards of such a tensor, naming it
    """
    if problem := _wrong_shards(shards, region.shape):
        raise LookupError(f"has {name} {problem}")
    if shards[0].region.order != region.order:
        whole = assemble(name, shards)
        return in_memory_order(whole, region.order)[region.begin : region.begin + numel]
    values = torch.empty(numel, dtype=shards[0].values.dtype)
    for shard in shards:
        first = max(region.begin, shard.region.begin)
        last = min(region.begin + numel, shard.region.begin + shard.values.numel())
        if first < last:
            values[first - region.begin : last - region.begin] = shard.values[
                first - shard.region.begin : last - shard.region.begin
            ]
    return values


def assemble(name: str, shards: Sequence[Shard]) -> Tensor:
    """The whole tensor, laid out in memory as it was saved.

    :raises LookupError: as :func:`read`
    """
    _, shape, order = shards[0].region
    flat = read(name, shards, torch.Size(shape).numel(), Region(0, shape, order))
    back = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([shape[dim] for dim in order]).permute(back)


class Shards(NamedTuple):
    """All files of a sharded checkpoint.

    :param parameters: the names of the model's parameters, in the order in which an optimizer numbers them
    :param tied: for each further name of a parameter that several modules hold, its first
    """

    shards: Saved
    parameters: list[str]
    tied: dict[str, str]


def shard_content(shards: Mapping[str, Shard], parameters: list[str], tied: dict[str, str]) -> dict[str, Any]:
    """The content of one rank's file, in the types that ``torch.load(weights_only=True)`` reads; see :class:`Shards`."""
    packed = {name: (values, *region) for name, (values, region) in shards.items()}
    return {"shards": packed, "parameters": parameters, "tied": tied}


def write_together(
    path: Path, step: int, facts: Mapping[str, Any], own: Any, more: Mapping[str, Any], env: DistEnv
) -> None:
    """Write a sharded checkpoint into one folder, which gets its name when it is complete. A collective.

    :param path: of the checkpoint's folder, on rank 0; one that is there is replaced
    :param facts: of its manifest, on rank 0
    :param own: what this rank writes, see :func:`shard_content`
    :param more: further entries, by their keys, which rank 0 writes
    :raises UsageError: on every rank, when one cannot write; earlier checkpoints are untouched
    """
    with contextlib.ExitStack() as at_the_end:

        @writing(path)
        def begun() -> Path:
            return at_the_end.enter_context(directory.scratch_in(path.parent))

        scratch = env.from_rank_0(begun)
        with env.fail_together(), writing(path):
            if not scratch.is_dir():
                raise UsageError(
                    f"{path.parent} on {env.host} is not that of rank 0: every rank of --strategy zero1, zero2, zero3 and fsdp2 "
                    "writes its part there, so give a --run-dir that all hosts share"
                )
            key = f"rank-{env.rank}-of-{env.world_size}"
            entry = key, folder.write_entry(scratch, key, own)
        entries: list[Any] = [None] * env.world_size
        dist.all_gather_object(entries, entry)
        with env.fail_together(), writing(path):
            if env.is_main:
                entries += [(key, folder.write_entry(scratch, key, content)) for key, content in more.items()]
                folder.complete(scratch, step, facts, dict(entries))
                directory.move_into_place(scratch, path)


def open_shards(path: Path) -> Shards:
    """All shards of a verified sharded checkpoint, mapped from its files.

    :raises Damaged: when a file holds something else
    """
    shards: Saved = {}
    for key in folder.shard_keys(path):
        content = folder.load(path, key, mapped=True)
        try:
            for name, (values, begin, shape, order) in content["shards"].items():
                if not (values.dim() == 1 and values.is_contiguous()):
                    raise ValueError(name)  # an expanded tensor seems larger than its file
                shards.setdefault(name, []).append(Shard(values, Region(begin, tuple(shape), tuple(order))))
            whole = Shards(shards, content["parameters"], content["tied"])
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise Damaged(path, f"{key}.pt holds something else than shards") from error
    return whole


def assembled(path: Path, kind: str) -> Any:
    """The state that a job of replicas would have written, put together from a verified sharded checkpoint.

    :param kind: ``"model"`` or ``"optimizer"``
    :returns: the state dict of the plain module, or that of the optimizer without the settings of its parameter groups
    :raises Damaged: when the shards are not those of whole tensors
    """
    shards, parameters, tied = open_shards(path)
    numbers = {name: number for number, name in enumerate(parameters)}
    weights: dict[str, Tensor] = {}
    state: dict[int, dict[str, Tensor]] = {}
    try:
        for key_and_name, parts in shards.items():
            key, _, name = key_and_name.partition(":")
            if kind == WEIGHT == key:
                weights[name] = assemble(key_and_name, parts)
            elif kind != WEIGHT != key:
                state.setdefault(numbers[name], {})[key] = assemble(key_and_name, parts)
        if kind == WEIGHT:
            return weights | {alias: weights[name] for alias, name in tied.items()}
    except LookupError as error:
        raise Damaged(path, str(error.args[0])) from error
    return {"state": state, "param_groups": [{"params": list(numbers.values())}]}


def _wrong_shards(shards: Sequence[Shard], shape: tuple[int, ...]) -> str | None:
    """The first thing that is wrong with the shards of a tensor that should have this shape, or None."""
    if not shards:
        return "nowhere"
    _, saved_shape, order = shards[0].region
    if saved_shape != shape:
        return f"of shape {list(saved_shape)} instead of {list(shape)}"
    numel, dtype = torch.Size(shape).numel(), shards[0].values.dtype
    at = 0
    for values, region in sorted(shards, key=lambda shard: shard.region.begin):
        if (region.shape, region.order, values.dtype) != (shape, order, dtype):
            return "in shards that are of different tensors"
        if values.numel() and region.begin != at:
            return f"in shards with a gap or an overlap at element {min(at, region.begin)}"
        at += values.numel()
    return None if at == numel else f"in shards of {at} elements instead of {numel}"
