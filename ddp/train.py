"""Train one network on several devices, with nothing but torch.distributed between you and the mechanism.

    torchrun --nproc_per_node=2 -m ddp.train --device cpu
    torchrun --nproc_per_node=N -m ddp.train                # on N GPUs

One process per device, a *rank*, runs this file. All ranks hold the same weights. Each takes a different, equal part of every
global batch (``--batch-size`` counts the samples of all ranks). DistributedDataParallel averages the gradients over the ranks
while backward still runs, so every rank takes the same step. Averaging is an all-reduce (a sum) and a division. An all-reduce
is a *collective*: all ranks must call it, and none gets the sum before the last one has called it. So all must call the same
collectives in the same order, or they hang.

ddp/resilience/ keeps a long job alive, by two objects that this loop calls. The *guard* is called three times: ``batches`` in
``train_epoch``, ``report`` and ``may_step`` in ``train_step``. The *supervisor* writes logs and checkpoints, and ends the run
at a stop signal. The chapters to read beside this: ddp/README.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.command_line.cli import command, parse
from common.data.datasets import Batch, ImageData
from common.randomness import seed_torch
from common.training.evaluation import Evaluation, evaluate
from common.training.optimization import build_optimizer
from ddp.batchnorm import make_buffers_equal
from ddp.config import TrainConfig
from ddp.data import load_data, open_loaders
from ddp.job import Job
from ddp.network import average_by_hook, build_network, clip_grad_norm_of_shards, wrap_by_hand_or_sharded
from ddp.rendezvous import DistEnv, find_dist_env, rank_process, rendezvous_store
from ddp.resilience import RunCheckpoint, Supervisor, build_guard, complete_settings, open_run, supervise
from ddp.sampler import MicroBatchSampler
from ddp.strategies import Averaging


@command
def main() -> None:
    config = parse(TrainConfig, "ddp.train", __doc__)
    env = find_dist_env(config.device, config.backend)  # torchrun tells each process its rank through the environment
    if env.device.type == "cuda":
        torch.cuda.set_device(env.device)  # first: an earlier use of CUDA would take GPU 0, on every rank
    torch.set_num_threads(config.threads or env.share_of_cores)  # the ranks of a node share its cores
    with rank_process(env):  # reports an error with its rank, and then leaves the group
        dist.init_process_group(
            env.backend,  # NCCL on GPUs, gloo on CPUs
            # The ranks meet at this store, and compare their settings there.
            store=rendezvous_store(env, timeout_s=config.timeout, settings=config),
            rank=env.rank,
            world_size=env.world_size,
            timeout=config.collective_timeout,
            device_id=env.nccl_device,
        )
        train(config, env)
        dist.destroy_process_group()


def train(config: TrainConfig, env: DistEnv) -> None:
    """The whole run on one rank, from an empty directory or the newest checkpoint to the plots."""
    config = complete_settings(config, env)  # all ranks get the same; --fast chooses what was not given
    data = load_data(config, env)
    with open_run(config, env, data) as checkpoint:  # to continue from; None in a new run
        job = build_job(config, env, data, checkpoint)
        # build_job has restored the weights, unless they are in shards. This restores shards, the optimizer and the progress.
        with supervise(job, checkpoint) as supervisor:
            result = None
            while job.epoch < config.epochs:
                train_epoch(job, supervisor.after_step)
                result = test(job, supervisor)
                supervisor.end_epoch(result)  # adds 1 to job.epoch, and logs the result
                supervisor.checkpointer.save(job)  # rank 0 writes for all; with shards, each rank writes its own
            supervisor.checkpointer.finish()
            result = result or test(job, supervisor)  # None if no epoch was left to train
        supervisor.report(result)  # rank 0 draws and prints, the others wait


def build_job(config: TrainConfig, env: DistEnv, data: ImageData, checkpoint: RunCheckpoint | None = None) -> Job:
    """Model, optimizer, sampler and loader. The ranks differ in their samples, and with shards in their part of the model."""
    network = build_network(config, env, data, checkpoint)
    model = wrap_network(network, env, config.averaging, config.precision)
    if config.is_sharded:
        network = model  # no rank has the whole network: the sharded module is evaluated and saved
    if config.compile:
        model = torch.compile(model, mode=config.compile)
    sampler = MicroBatchSampler(
        data.train, config.batch_size, config.grad_accumulation_steps, env.world_size, env.rank, config.seed
    )
    loader, test_loader = open_loaders(data, sampler, env, config)
    # ``model`` and ``network`` share the same parameters, so the optimizer may take those of ``network``.
    job = Job(
        config=config,
        env=env,
        data=data,
        network=network,
        model=model,
        optimizer=build_optimizer(
            config.optimizer, network.parameters(), momentum=config.momentum, weight_decay=config.weight_decay
        ),
        # Backward in fp16 rounds gradients below 3e-8 to zero: the scaler multiplies the loss, and later divides the gradients.
        scaler=torch.amp.GradScaler(env.device.type, enabled=config.precision == "fp16"),
        clip_grad_norm_=clip_grad_norm_of_shards if config.is_sharded else nn.utils.clip_grad_norm_,
        learning_rate=config.learning_rates(sampler.steps_per_epoch),  # a function of the step
        sampler=sampler,
        loader=loader,
        test_loader=test_loader,
    )
    # The guard begins with a backward pass that is thrown away. DDP rearranges its buckets after its first pass, which changes the
    # last bits of sums over three ranks or more. So DDP does it before the first step, in a new run as in a resumed one.
    job.guard = build_guard(job)
    return job


def wrap_network(network: nn.Module, env: DistEnv, averaging: Averaging, precision: str = "fp32") -> Any:
    """The network in DDP, which from here on averages its gradients over the ranks in every backward pass outside ``no_sync``.

    :returns: a module with ``no_sync()``; with a sharded strategy, each rank has a part of the network instead of a replica
    """
    if averaging.strategy != "torch":
        return wrap_by_hand_or_sharded(network, env, averaging, precision)
    model = DistributedDataParallel(  # broadcasts rank 0's weights to all ranks
        network,
        device_ids=[env.device] if env.device.type == "cuda" else None,
        # DDP all-reduces buckets of many gradients. Each .grad is a view into its bucket: the average needs no copy.
        bucket_cap_mb=averaging.bucket_mib,
        gradient_as_bucket_view=True,
    )
    # DDP would broadcast rank 0's BatchNorm statistics in every step. train_epoch averages them once per epoch instead.
    # (The constructor's argument has another name in newer torch, forward_sync_buffers. The attribute has this one in both.)
    model.broadcast_buffers = False
    # How gradients are averaged: in shared memory (the default for CPUs of one host), by another --all-reduce, or in bf16.
    average_by_hook(model, averaging, env)
    return model


def train_epoch(job: Job, after_step: Callable[[], None] = lambda: None) -> None:
    """One pass over the training set, or over what is left of it when the run was resumed inside an epoch."""
    # Each epoch has a new order. All ranks have the same, so that their parts do not overlap. A resume begins at first_step.
    job.sampler.set_epoch(job.epoch, first_step=job.step_in_epoch)
    job.model.train()
    batches = job.guard.batches(job.loader)
    while job.step_in_epoch < job.sampler.steps_per_epoch:  # train_step adds 1 to job.step
        train_step(job, batches)
        last_step = job.step_in_epoch == job.sampler.steps_per_epoch
        if job.step % job.config.log_every == 0 or last_step:
            job.log_window()  # loss and accuracy since the last time, summed over the ranks
        if last_step:
            make_buffers_equal(job.network)  # BatchNorm's statistics: each rank saw different samples
        after_step()
    # All batches are used. One more next() ends the loader's iterator, so that it keeps its workers for the next epoch.
    next(batches, None)


def train_step(job: Job, batches: Iterator[Batch]) -> None:
    """One optimizer step on one global batch: forward and backward of this rank's micro-batches, then the update."""
    config, device, model, scaler = job.config, job.env.device, job.model, job.scaler
    losses = []
    for micro_step in range(config.grad_accumulation_steps):
        images, labels = next(batches)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        seed_torch(device, config.seed, "dropout", job.step, micro_step, job.env.rank)  # each rank drops other units

        # DDP decides in forward whether the next backward synchronizes, so no_sync must cover forward: around backward alone
        # it has no effect, and every micro-step would all-reduce. Before the last micro-step, .grad adds up on each rank
        # alone. The last backward averages that sum over the ranks.
        last_micro_step = micro_step == config.grad_accumulation_steps - 1
        with contextlib.nullcontext() if last_micro_step else model.no_sync():
            with torch.autocast(device.type, job.autocast_dtype, enabled=job.autocast_dtype is not None):
                logits = model(job.data.to_input(images, job.memory_format))  # uint8 becomes normalized float32
                loss = F.cross_entropy(logits.float(), labels, label_smoothing=config.label_smoothing)
            losses.append(loss.detach())
            job.window.add(loss, logits, labels)  # for the log
            if last_micro_step:
                # Each rank sets flags, such as "a stop signal came" or "my loss is inf". In the sum over the ranks, a flag is not 0 if
                # any rank has set it.
                reports = job.guard.report(losses)  # this rank's flags; after summing.wait() below, the sum
                summing = dist.all_reduce(reports, async_op=True)
            # We want the mean over the global batch. Images: all micro-batches are equally large, so divide by their number per rank
            # here; DDP divides by the number of ranks. Text: lines differ in length, so weigh_text multiplies by the number of ranks, and
            # by this micro-batch's share of the global batch's characters.
            loss = job.weigh_text(loss, labels) if job.data.is_text else loss / config.grad_accumulation_steps
            scaler.scale(loss).backward()
    summing.wait()  # gloo: usually done by now. NCCL: the GPU waits, Python does not

    # All ranks hold the same averaged gradients now, or shards of them, and get the same norm. Unscale before the clip: scaled
    # gradients, and their norm, are too large by the loss scale, so clipping would shrink every step. (Outside fp16 the scaler does
    # nothing.)
    scaler.unscale_(job.optimizer)
    norm = job.clip_grad_norm_(model.parameters(), config.clip_norm) if config.clip_norm else None
    for group in job.optimizer.param_groups:
        group["lr"] = job.learning_rate(job.step)
    # One rank's inf or nan in a gradient is in every rank's average; in a loss, it is in the reports. So all ranks skip this
    # step, or none does. On a CPU, may_step is False for a step to skip. On a GPU with a fused optimizer it is True, since the host does
    # not know yet: the optimizer's kernels know, and change nothing. (In fp16 a gradient that overflows is normal: may_step is True,
    # scaler.step skips the step, and scaler.update lowers the scale.)
    if job.guard.may_step(norm, reports):
        scaler.step(job.optimizer)
    scaler.update()
    job.optimizer.zero_grad(set_to_none=True)
    job.step += 1  # skipped or not: the learning rate and job.step_in_epoch are functions of it


def test(job: Job, supervisor: Supervisor) -> Evaluation:
    """Evaluate the test set: divided over the ranks without padding, so that each sample counts once."""
    own_part = supervisor.until_stopped(job.test_loader)  # a rank that got a stop signal leaves out the rest
    result = evaluate(job.network, job.data, job.env, job.config.precision, own_part)
    supervisor.leave_if_stopped()  # if any rank was stopped, all leave here
    return result


if __name__ == "__main__":
    main()
