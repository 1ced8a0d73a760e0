"""The state that a run needs to continue bit for bit: how it is taken from a job, and restored.

All randomness is a function of (seed, epoch, step, rank, sample). So the state is the weights, the optimizer's tensors, and
a few numbers. Two things differ between ranks: BatchNorm's running statistics, which are averaged only at an epoch's end,
and the metrics since the last log line. A run resumed with another number of ranks continues from their averages and sums.
"""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from common.models.modules import persistent_buffers
from common.training.optimization import begin_momentum, set_learning_rate
from common.training.window import WindowState, WindowTotals
from ddp.batchnorm import statistics
from ddp.checkpoint import storage
from ddp.checkpoint.shards import Part, Region, memory_of, new_state, open_tensors, restore_optimizer
from ddp.checkpoint.storage import Manifest
from ddp.job import Job


def state_of_rank(job: Job) -> dict[str, Any]:
    """The state that differs between ranks: this rank's buffers and metrics window, on the CPU."""
    buffers = copy_on_host(dict(job.named_module.named_buffers()), job.env.device)
    return {"buffers": buffers, "window": tuple(job.window.state())}


def copy_on_host(state: Any, device: torch.device) -> Any:
    """A copy of nested dicts, lists and tensors in the CPU's memory, which further steps do not change."""
    copy = tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", non_blocking=True, copy=True), state)
    if device.type == "cuda":  # into pinned memory, with one wait for all tensors
        torch.cuda.current_stream(device).synchronize()
    return copy


def state_of_job(job: Job, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The files of a checkpoint. Tensors are not copied; they stay on their device.

    :param ranks: each rank's :func:`state_of_rank`
    :returns: ``model``, ``optimizer`` and ``ranks``
    """
    model = job.named_module.state_dict()  # of the plain module, so that no key begins with "module."
    return {"model": model | saved_buffers(job, ranks), "optimizer": job.optimizer.state_dict(), "ranks": ranks}


def saved_buffers(job: Job, ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The buffers of a ``state_dict``, as at an epoch's end: within an epoch, BatchNorm's statistics are averaged here."""
    buffers = dict(job.named_module.named_buffers())
    first = {buffer: name for name, buffer in buffers.items()}  # of a module that is used twice, its first name
    if job.step_in_epoch:
        for buffer in statistics(job.named_module):
            name = first[buffer]
            buffers[name] = torch.stack([rank["buffers"][name] for rank in ranks]).mean(0)
    # A copy has no gaps in memory, as what forward assigns may have.
    return {name: buffers[first[buffer]].clone() for name, buffer in persistent_buffers(job.named_module).items()}


def manifest_of(job: Job) -> Manifest:
    """The facts of a checkpoint: all that is no tensor."""
    return Manifest(
        step=job.step,
        epoch=job.epoch,
        step_in_epoch=job.step_in_epoch,
        world_size=job.env.world_size,
        dataset_length=len(job.data.train),
        dataset_fingerprint=job.data.fingerprint,
        config=job.config.as_json(),
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
    """Restore all of a checkpoint but the weights of replicas, with which :func:`ddp.train.build_job` built the network. A
    collective.

    :raises UsageError: on every rank, when a file cannot be loaded, or holds what does not fit this job
    """
    env, progress = job.env, manifest.progress
    ranks = env.from_rank_0(lambda: storage.read(path, "ranks"))
    if job.config.is_sharded:
        from ddp.checkpoint.sharded_state import restore_shard  # only for a sharded model

        with env.fail_together():
            restore_shard(job.network, job.optimizer, path)
    else:
        _restore_optimizer(job, path)
    begin_momentum(job.optimizer)
    if progress["scaler"] and job.scaler.is_enabled():  # empty if the run was not in fp16 before
        job.scaler.load_state_dict(progress["scaler"])
    if len(ranks) == env.world_size:
        own_buffers = ranks[env.rank]["buffers"]
        for name, buffer in job.named_module.named_buffers():
            buffer.copy_(own_buffers[name])
    states = [WindowState(*rank["window"]) for rank in ranks]
    job.window.restore(WindowState.redistribute(states, env.world_size)[env.rank])
    job.windows = [WindowTotals(**window) for window in progress["windows"]]
    job.step, job.epoch = manifest.step, manifest.epoch
    if job.step:  # the last step's rate, which is saved again if the run was stopped after its last step
        set_learning_rate(job.optimizer, job.learning_rate(job.step - 1))
    job.skipped_steps, job.accuracy, job.best = progress["skipped_steps"], progress["accuracy"], progress["best"]


def _restore_optimizer(job: Job, path: Path) -> None:
    """The optimizer's state, which rank 0 reads and sends to all. Each tensor is broadcast by itself: none is pickled."""
    env, optimizer = job.env, job.optimizer
    parts = {name: Part(parameter, Region.of_whole(parameter)) for name, parameter in job.network.named_parameters()}
    optimizer.state.clear()  # first, so that memory never holds it twice

    def names_of_restored() -> list[str]:
        restore_optimizer(optimizer, parts, open_tensors(path, list(parts)), job.network.state_dict())
        return [name for name, part in parts.items() if part.parameter in optimizer.state]

    for name in env.from_rank_0(names_of_restored):
        parameter = parts[name].parameter
        if not env.is_main:
            optimizer.state[parameter] = new_state(optimizer, parameter)
        for value in optimizer.state[parameter].values():
            dist.broadcast(memory_of(value), src=0)
