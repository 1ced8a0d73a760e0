"""Train one network on several devices, with nothing but torch.distributed between you and the mechanism.

    torchrun --nproc_per_node=2 -m ddp.train

One process per device, a *rank*, runs this file. All ranks hold the same weights. Each takes a different, equal part of
every global batch (``--batch-size`` counts the samples of all ranks), and DistributedDataParallel averages the gradients
over the ranks while backward is still running. So every rank takes the same optimizer step. Averaging is an all-reduce, a
*collective*: it ends only once all ranks have called it. So all call the same ones in the same order, or wait forever.

What keeps a long job alive is layered around this in ddp/resilience/. On a first read, take ``guard.wrap(m)`` for ``m``,
``guard.batches(b)`` for ``b``, ``guard.attach(loss)`` for ``loss``, ``guard.accepts(norm)`` for "no inf, no nan", and skip
the supervisor, which logs, saves inside an epoch, and stops on request. The chapters to read beside it: ddp/README.md.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.cli import command, parse
from common.data.datasets import Batch, ImageData
from common.distributed.process_group import DistEnv, clean_exit, find_dist_env, rendezvous_errors, rendezvous_store
from common.distributed.rank_logging import rank_logging
from common.resilience.stop_request import to_be_requeued
from common.training.evaluation import Evaluation, evaluate
from common.training.models import build_model, to_device
from common.training.optimization import build_optimizer, set_learning_rate
from common.training.precision import autocast, set_arithmetic
from common.training.randomness import derive_seed, seed_torch
from common.training.window import WindowTotals
from ddp import by_hand, compression, sharded, strategies
from ddp.batchnorm import average_running_statistics, convert_sync_batchnorm
from ddp.by_hand.replicas import require_same_modules
from ddp.checkpoint.state import restore
from ddp.checkpoint.storage import load_weights
from ddp.config import TrainConfig
from ddp.data import load_data, open_loader, open_test_loader
from ddp.job import Job, StepGuard
from ddp.resilience.device_guard import choose_guard
from ddp.resilience.resume import CheckpointToResume, open_run
from ddp.resilience.supervisor import AFTER_THE_WATCHDOG_S, Supervisor
from ddp.sampler import MicroBatchSampler


@command
def main() -> None:
    config = parse(TrainConfig, "ddp.train", __doc__)
    env = find_dist_env(config.device, config.backend)  # torchrun tells each process its rank through the environment
    if env.device.type == "cuda":
        torch.cuda.set_device(env.device)  # before any other use of CUDA, which would take GPU 0 on every rank
    torch.set_num_threads(config.threads or env.share_of_cores)  # the ranks of a node share its cores
    set_arithmetic(env.device, config.tf32, config.deterministic, config.cudnn_benchmark)
    with to_be_requeued(), clean_exit(env), rank_logging(env):  # leaves the group after an error, too
        with rendezvous_errors(env):
            dist.init_process_group(
                env.backend,  # NCCL on GPUs, gloo on CPUs
                store=rendezvous_store(env, config.timeout, config),  # the ranks meet there, and compare their settings
                rank=env.rank,
                world_size=env.world_size,
                timeout=datetime.timedelta(seconds=config.timeout + AFTER_THE_WATCHDOG_S),  # the watchdog comes first
                device_id=env.nccl_device,
            )
        train(config, env)
        dist.destroy_process_group()


def train(config: TrainConfig, env: DistEnv) -> None:
    """The whole run on one rank, from an empty directory or the newest checkpoint to the figures."""
    with env.fail_together():  # if this fails on one rank, all stop: the others would wait for it forever
        config.check(env.world_size)
    data = load_data(config, env)
    with open_run(config, env, data) as found:
        job = build_job(config, env, data, found)
        if found is not None:
            restore(job, *found)
        with Supervisor(job, resumed=found is not None) as supervisor:
            result = None
            while job.epoch < config.epochs:
                totals = train_epoch(job, supervisor.after_step)
                result = test(job, supervisor)
                job.end_epoch(result.accuracy)
                supervisor.record_epoch(totals, result)
                supervisor.checkpointer.save(job)  # rank 0 writes, for all hold the same weights; of shards, all write
            supervisor.checkpointer.finish()
            result = result or test(job, supervisor)  # none yet, if it was resumed after its last epoch
        supervisor.report(result)  # rank 0 draws and prints, the others wait


def build_job(
    config: TrainConfig,
    env: DistEnv,
    data: ImageData,
    found: CheckpointToResume | None = None,
    guard: StepGuard | None = None,
    wrap: Callable[..., nn.Module] | None = None,
) -> Job:
    """Model, optimizer, sampler and loader: the same on every rank, except that each sampler yields other samples.

    :param found: the checkpoint to continue from. Rank 0 reads its weights, and DDP broadcasts them
    :param guard, wrap: what a benchmark puts in the place of ddp/resilience/guard.py's and of :func:`wrap_in_ddp`
    """
    torch.manual_seed(derive_seed(config.seed, "weights"))
    network = build_model(config.model, data.shape, len(data.classes), config.dropout, config.model_size)
    if config.sync_batchnorm:
        network = convert_sync_batchnorm(network, env.device)
    network = to_device(network, env.device, config.memory_format)
    with env.fail_together():
        if found is not None and env.is_main and not config.is_sharded:
            load_weights(network, found.path)
    guard = guard or choose_guard(env)
    if config.is_sharded:  # each rank has a part of the model instead of a replica: ddp/sharded/README.md
        network = sharded.shard_network(network, env, config.strategy, config.all_reduce, config.precision)
        model = guard.wrap(network)
    else:
        model = (wrap or wrap_in_ddp)(guard.wrap(network), env, config.averaging)
    if config.compile:
        model = torch.compile(model, mode=config.compile)  # type: ignore[assignment]
    accumulation = config.grad_accumulation_steps
    sampler = MicroBatchSampler(data.train, config.batch_size, accumulation, env.world_size, env.rank, config.seed)
    loader = open_loader(data.train, sampler, env, config.loading)
    test_loader = open_test_loader(data, env, config.loading)
    optimizer = build_optimizer(
        config.optimizer, network.parameters(), momentum=config.momentum, weight_decay=config.weight_decay
    )
    # In fp16, gradients below 6e-8 would become zero: the scaler multiplies the loss, and divides the gradients again.
    scaler = torch.amp.GradScaler(env.device.type, enabled=config.precision == "fp16")
    job = Job(config, env, data, network, model, optimizer, scaler, sampler, loader, test_loader, guard)
    guard.begin(job)
    return job


def wrap_in_ddp(module: nn.Module, env: DistEnv, averaging: strategies.Averaging) -> nn.Module:
    """The module in DDP, which from here on averages its gradients over the ranks in every backward pass.

    :raises UsageError: on every rank, if the ranks' models or settings differ
    """
    require_same_modules(module, averaging._asdict())
    if averaging.strategy != "torch":
        return by_hand.wrap_by_hand(module, env, averaging)  # DDP in readable Python
    model = DistributedDataParallel(  # broadcasts rank 0's weights to all ranks
        module,
        device_ids=[env.device] if env.device.type == "cuda" else None,
        # DDP all-reduces gradients in buckets of many gradients each. With .grad a view into its bucket, nothing is copied.
        bucket_cap_mb=averaging.bucket_mib,
        gradient_as_bucket_view=True,
    )
    # By default DDP broadcasts rank 0's BatchNorm statistics before every forward pass. train_epoch averages them instead,
    # once per epoch. (Set here, since the constructor's argument has another name since torch 2.15.)
    model.broadcast_buffers = False
    compression.compress_gradients(model, averaging.gradient_precision)
    return model


def train_epoch(job: Job, after_step: Callable[[], None] = lambda: None) -> WindowTotals:
    """One pass over the training set, or over what is left of it when the run was resumed inside an epoch."""
    # A new order in each epoch, the same on all ranks, or their parts would overlap. (first_step: where a resume goes on.)
    job.sampler.set_epoch(job.epoch, first_step=job.step_in_epoch)
    job.model.train()
    batches = job.window.timed(job.guard.batches(job.loader))
    while job.step_in_epoch < job.sampler.steps_per_epoch:
        train_step(job, batches)
        last = job.step_in_epoch == job.sampler.steps_per_epoch
        if job.step % job.config.log_every == 0 or last:
            job.log_window()  # loss and accuracy since the last time, summed over the ranks
        if last:
            average_running_statistics(job.network)  # BatchNorm's: each rank saw other samples
        after_step()
    next(batches, None)  # exhausts the loader, or its persistent workers could not be used again
    return WindowTotals.merge(job.windows)


def train_step(job: Job, batches: Iterator[Batch]) -> None:
    """One optimizer step on one global batch: forward and backward of this rank's micro-batches, then the update."""
    config, device, scaler, guard = job.config, job.env.device, job.scaler, job.guard
    for micro_step in range(config.grad_accumulation_steps):
        images, labels = next(batches)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        seed_torch(device, config.seed, "dropout", job.step, micro_step, job.env.rank)  # each rank drops other units

        # DDP decides in forward whether the next backward synchronizes, so no_sync must cover both: around backward alone
        # it has no effect, and every micro-step would all-reduce. Until the last, .grad adds up on each rank alone. The
        # last one's backward averages that sum over the ranks. Each loss is a mean: divided, they add up to a mean again.
        last = micro_step == config.grad_accumulation_steps - 1
        with contextlib.nullcontext() if last else job.model.no_sync():
            with autocast(device, config.precision):
                logits = job.model(job.data.to_input(images, config.memory_format))
                loss = F.cross_entropy(logits.float(), labels, label_smoothing=config.label_smoothing)
            scaler.scale(guard.attach(loss) / job.divisor(labels)).backward()
        job.window.add(loss, logits, labels)

    # Every rank holds the same averaged gradients now, so the same norm: an inf or nan of one rank is in every average.
    # Unscale before the clip: scaled gradients, and their norm, are too large by the loss scale.
    scaler.unscale_(job.optimizer)
    norm = job.clip_grad_norm_(config.clip_norm) if config.clip_norm else None
    set_learning_rate(job.optimizer, config.rate_at(job.step, job.sampler.steps_per_epoch))
    # On an inf or nan every rank skips the step: in fp16 scaler.step does (and update lowers the scale), else the guard.
    if guard.accepts(norm):
        scaler.step(job.optimizer)
    scaler.update()
    job.optimizer.zero_grad(set_to_none=True)
    job.step += 1  # skipped or not: the learning rate is a function of it


def test(job: Job, supervisor: Supervisor) -> Evaluation:
    """Evaluate the test set: divided over the ranks without padding, so that each sample counts once."""
    shard = supervisor.until_stopped(job.test_loader)  # a rank that got a stop signal evaluates no further batch
    result = evaluate(job.network, job.data, job.env, job.config.precision, shard)
    supervisor.leave_if_stopped()  # all ranks leave then
    return result


if __name__ == "__main__":
    main()
