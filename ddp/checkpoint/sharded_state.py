"""The state of a sharded job: each rank writes its own part, and takes its part of what any other job has written.

No rank ever has more than its own part and, while it reads, one whole tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.distributed.dist_env import DistEnv
from common.errors import UsageError
from common.files.run_directory import writing
from common.models.modules import persistent_buffers
from common.training.optimization import STATE_OF
from ddp.checkpoint.directory import move_into_place, newest, scratch_in
from ddp.checkpoint.folder import Checkpoint, complete, load, write_entry
from ddp.checkpoint.shards import (
    WEIGHT,
    Part,
    Region,
    SavedShard,
    memory_of,
    open_tensors,
    restore_optimizer,
    shard_content,
)
from ddp.sharded.fully_shard import FullyShard
from ddp.sharded.zero1 import ZeRO1

SETTINGS = "optimizer-settings"  # the entry with the optimizer's groups: their rates, but not their parameters


def save_sharded(
    directory: str | Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, **state: Any
) -> Path:
    """Write a checkpoint of a model that :func:`ddp.sharded.shard` returned, of which each rank writes its part. A collective.

    Any number of ranks continues from it, at any stage, with rank 0's buffers. ``prune`` and ``clean`` are for rank 0, as with ``save``.

    :param optimizer: SGD, Adam or AdamW of the model's ``parameters()``
    :param state: further entries, as the state dict of a scheduler, the same on all ranks; rank 0 writes them
    :returns: the checkpoint's folder
    :raises UsageError: on every rank, when one cannot write; earlier checkpoints are untouched
    :raises TypeError: for another optimizer
    """
    if type(optimizer) not in STATE_OF or optimizer.defaults.get("amsgrad"):
        raise TypeError(f"{type(optimizer).__name__} cannot be saved in shards: use SGD, Adam or AdamW without amsgrad")
    plain, env = model.get_submodule("module"), DistEnv.of_group()
    own = state_of_shard(model, optimizer, persistent_buffers(plain), env.is_main)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    path = Path(directory) / f"step-{step:08d}"
    write_together(path, step, {}, own, state | {SETTINGS: groups}, env)
    return path


def load_sharded(directory: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Checkpoint | None:
    """Continue from the newest checkpoint that is whole, of any number of ranks and any stage. A collective.

    :param model: what :func:`ddp.sharded.shard` returned
    :param optimizer: built as the one that was saved, with as many groups
    :returns: the checkpoint, for :func:`ddp.checkpoint.load` to read further entries; None if there is none
    :raises UsageError: on every rank, when all are damaged, or the newest is of another model
    """
    env = DistEnv.of_group()
    checkpoint: Checkpoint | None = env.from_rank_0(lambda: newest(directory, set_aside=True))
    if checkpoint is not None:
        with env.fail_together():
            restore_shard(model, optimizer, checkpoint.path)
            for group, saved in zip(optimizer.param_groups, load(checkpoint.path, SETTINGS), strict=True):
                group.update(saved)
    return checkpoint


def write_together(
    path: Path, step: int, facts: Mapping[str, Any], own: Any, more: Mapping[str, Any], env: DistEnv
) -> None:
    """Write a sharded checkpoint into one folder, which gets its name when it is complete. A collective.

    :param path: of the checkpoint's folder, on rank 0; one that is there is replaced
    :param facts: of its manifest, on rank 0
    :param own: what this rank writes, see :func:`state_of_shard`
    :param more: further entries, by their keys, which rank 0 writes
    :raises UsageError: on every rank, when one cannot write; earlier checkpoints are untouched
    """
    with contextlib.ExitStack() as at_the_end:

        @writing(path)
        def begun() -> Path:
            return at_the_end.enter_context(scratch_in(path.parent))

        scratch = env.from_rank_0(begun)
        with env.fail_together(), writing(path):
            if not scratch.is_dir():
                raise UsageError(
                    f"{path.parent} on {env.host} is not that of rank 0: every rank of --strategy zero1, zero2, zero3 and fsdp2 "
                    "writes its part there, so give a --run-dir that all hosts share"
                )
            key = f"rank-{env.rank}-of-{env.world_size}"
            entry = key, write_entry(scratch, key, own)
        entries: list[Any] = [None] * env.world_size
        dist.all_gather_object(entries, entry)
        with env.fail_together(), writing(path):
            if env.is_main:
                entries += [(key, write_entry(scratch, key, content)) for key, content in more.items()]
                complete(scratch, step, facts, dict(entries))
                move_into_place(scratch, path)


def layout_of(network: nn.Module) -> dict[str, Part]:
    """The parts of all parameters by name, in the order of the plain module's ``named_parameters()``.

    :param network: what :func:`ddp.sharded.shard_network` returned
    """
    return dict(_of_fully_shard(network) if isinstance(network, FullyShard) else _of_zero(network))


def _of_zero(network: nn.Module) -> Iterator[tuple[str, Part]]:
    assert isinstance(network, ZeRO1)
    parts: dict[str, Part] = {}
    for flat in network.flats:
        for name, shard, begin, like in zip(flat.owners, flat.shard_parameters, flat.begins(), flat.like, strict=True):
            region = Region.of_whole(like)._replace(begin=begin)
            parts[name] = Part(shard, region, in_full=flat.shard_in_whole)
    for name, parameter in network.module.named_parameters():
        if name in parts:
            yield name, parts[name]
        else:  # frozen, and whole up to stage 2
            yield name, Part(parameter, Region.of_whole(parameter), replicated=True)


def _of_fully_shard(network: FullyShard) -> Iterator[tuple[str, Part]]:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    for part in network.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # the root stays whole after a forward pass without gradients
    for name, parameter in network.named_parameters():
        assert isinstance(parameter, DTensor)
        shape, mesh = tuple(parameter.shape), parameter.device_mesh
        rows = -(-shape[0] // mesh.size())  # of each rank but the last ones, as torch.chunk cuts
        begin = min(rows * mesh.get_local_rank(), shape[0]) * (parameter.numel() // shape[0])
        yield name, Part(parameter, Region(begin, shape, tuple(range(len(shape)))))


def state_of_shard(
    network: nn.Module, optimizer: torch.optim.Optimizer, buffers: Mapping[str, Tensor], first: bool
) -> dict[str, Any]:
    """The content of this rank's file. Tensors are not copied, except for shards in the memory of whole parameters.

    :param network: what :func:`ddp.sharded.shard_network` returned
    :param buffers: of the plain module, by name
    :param first: whether this is rank 0, which writes also what all ranks have
    """
    shards: dict[str, SavedShard] = {}
    layout = layout_of(network)
    for name, part in layout.items():
        if first or not part.replicated:
            values = memory_of(part.parameter)
            # torch.save writes whole storages: without the copy, those of the whole parameters.
            shards[f"{WEIGHT}:{name}"] = SavedShard(values.clone() if part.in_full else values, part.region)
        for key, value in optimizer.state.get(part.parameter, {}).items():
            if value is None:
                continue
            if value.dim():
                shards[f"{key}:{name}"] = SavedShard(memory_of(value), part.region)
            elif first:  # Adam's count of steps, the same on every rank
                shards[f"{key}:{name}"] = SavedShard.of_whole(value)
    if first:
        shards |= {f"{WEIGHT}:{name}": SavedShard.of_whole(value) for name, value in buffers.items()}
    return shard_content(shards, list(layout), _tied(network.get_submodule("module")))


def restore_shard(network: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Take this rank's part of the parameters and the optimizer's state from a verified checkpoint of any strategy.

    :param network: what :func:`ddp.sharded.shard_network` returned
    :raises Damaged: when it holds other tensors than this network's
    """
    layout, plain = layout_of(network), network.get_submodule("module")
    saved, buffers = open_tensors(path, list(layout)), persistent_buffers(plain)
    restore_optimizer(optimizer, layout, saved, (*layout, *_tied(plain), *buffers))
    for name, buffer in buffers.items():
        saved.fill(buffer, f"{WEIGHT}:{name}", Region.of_whole(buffer))
    for name, part in layout.items():
        saved.fill(part.parameter, f"{WEIGHT}:{name}", part.region)


def _tied(module: nn.Module) -> dict[str, str]:
    """The further names of parameters that several modules hold, each with the first."""
    first: dict[nn.Parameter, str] = {}
    names = {name: first.setdefault(value, name) for name, value in module.named_parameters(remove_duplicate=False)}
    return {alias: name for alias, name in names.items() if alias != name}
