"""What a run needs to continue bit for bit, and how it comes back into a job.

All randomness is a function of (seed, epoch, step, rank, sample), so it is the weights, the optimizer's tensors, and a few
numbers. Two things differ between ranks: BatchNorm's running statistics, which are averaged only at an epoch's end, and the
window of the metrics that is not yet full. With another number of ranks, their averages and sums go on instead.
"""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.process_group import DistEnv
from common.training.optimization import begin_momentum
from common.training.window import WindowState, WindowTotals
from ddp.checkpoint import storage
from ddp.checkpoint.manifest import Manifest
from ddp.job import Job


def state_of_rank(job: Job) -> dict[str, Any]:
    """What only this rank has, on the CPU."""
    buffers = {name: value.cpu() for name, value in job.network.named_buffers()}
    return {"buffers": buffers, "window": tuple(job.window.state())}


def state_of_job(job: Job, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The tensors of a checkpoint, where they are.

    :param ranks: each rank's :func:`state_of_rank`
    """
    model = job.network.state_dict()  # of the plain module: no "module." in its keys
    if job.step_in_epoch:  # inside an epoch: the statistics with which one would evaluate it now
        model |= _mean_buffers([rank["buffers"] for rank in ranks])
    return {"model": model, "optimizer": job.optimizer.state_dict(), "ranks": ranks}


def _mean_buffers(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean over the ranks of what is a statistic; rank 0's of what is a count."""
    names = [name for name, value in ranks[0].items() if value.is_floating_point()]
    return {name: torch.stack([rank[name] for rank in ranks]).mean(0) for name in names}


def manifest_of(job: Job) -> Manifest:
    """The numbers of a checkpoint."""
    config, env = job.config, job.env
    return Manifest(
        step=job.step,
        epoch=job.epoch,
        position=job.step_in_epoch,
        seed=config.seed,
        world_size=env.world_size,
        batch_size=config.batch_size,
        grad_accumulation_steps=config.grad_accumulation_steps,
        dataset=config.dataset,
        dataset_length=len(job.data.train),
        dataset_fingerprint=job.data.fingerprint,
        model=config.model,
        optimizer=config.optimizer,
        config=config.as_json(),
        progress={
            "scaler": job.scaler.state_dict(),
            "windows": [dataclasses.asdict(window) for window in job.windows],
            "skipped_steps": job.skipped_steps,
            "accuracy": job.accuracy,
            "best": job.best,
        },
        versions={"torch": torch.__version__, "python": platform.python_version()},
    )


def restore(job: Job, path: Path, manifest: Manifest) -> None:
    """Continue from a checkpoint, whose weights the network holds already (see :func:`ddp.train.build_job`). A collective.

    :raises UsageError: on every rank, when one of its files has been damaged since it was verified
    """
    env, progress = job.env, manifest.progress
    contents: list[Any] = [None, None]
    with env.fail_together():
        if env.is_main:
            contents = [storage.read(path, "optimizer"), storage.read(path, "ranks")]
    ranks = [contents[1]]
    dist.broadcast_object_list(ranks, src=0, device=env.device)
    job.optimizer.state.clear()  # or it would be there twice for a while
    optimizer = broadcast_tree(contents[0], env)

    hyperparameters = [{k: v for k, v in group.items() if k != "params"} for group in job.optimizer.param_groups]
    job.optimizer.load_state_dict(optimizer)
    for group, own in zip(job.optimizer.param_groups, hyperparameters, strict=True):
        group.update(own)  # this run's weight decay and momentum, should they have been changed
    begin_momentum(job.optimizer)
    if progress["scaler"] and job.scaler.is_enabled():  # empty if the run was not in fp16 until now
        job.scaler.load_state_dict(progress["scaler"])
    if len(ranks[0]) == env.world_size:
        own_buffers = ranks[0][env.rank]["buffers"]
        for name, buffer in job.network.named_buffers():
            buffer.copy_(own_buffers[name])
    states = [WindowState(*rank["window"]) for rank in ranks[0]]
    job.window.restore(WindowState.redistribute(states, env.world_size)[env.rank])
    job.windows = [WindowTotals(**window) for window in progress["windows"]]
    job.step, job.epoch = manifest.step, manifest.epoch
    job.skipped_steps, job.accuracy, job.best = progress["skipped_steps"], progress["accuracy"], progress["best"]


def broadcast_tree(tree: Any, env: DistEnv) -> Any:
    """Rank 0's nested dicts and lists on every rank, each tensor sent by itself to where it is needed: never pickled, and
    never twice on a device.

    :param tree: on rank 0; ignored on the others
    """
    tensors: list[Tensor] = []
    outline = [_without_tensors(tree, tensors)]
    dist.broadcast_object_list(outline, src=0, device=env.device)
    return _with_tensors(outline[0], iter(tensors), env)


@dataclasses.dataclass(frozen=True)
class _Missing:
    """Stands for a tensor in a tree that is sent ahead."""

    shape: torch.Size
    stride: tuple[int, ...]  # the optimizer's fused kernels take its tensors for laid out as the parameters are
    dtype: torch.dtype


def _without_tensors(tree: Any, tensors: list[Tensor]) -> Any:
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return _Missing(tree.shape, tree.stride(), tree.dtype)
    if isinstance(tree, dict):
        return {key: _without_tensors(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_without_tensors(value, tensors) for value in tree]
    return tree


def _with_tensors(tree: Any, tensors: Any, env: DistEnv) -> Any:
    if isinstance(tree, _Missing):
        if env.is_main:
            tensor = next(tensors).to(env.device)
        else:
            tensor = torch.empty_strided(tree.shape, tree.stride, dtype=tree.dtype, device=env.device)
        dist.broadcast(tensor.as_strided((tensor.numel(),), (1,)), src=0)  # its memory, in whatever order it is
        return tensor
    if isinstance(tree, dict):
        return {key: _with_tensors(value, tensors, env) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_with_tensors(value, tensors, env) for value in tree]
    return tree
