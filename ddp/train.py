"""Train a network on every device at once, with nothing but torch.distributed between you and the mechanism.

    torchrun --nproc_per_node=2 -m ddp.train

One process per device runs this file from top to bottom. All hold the same weights. Each takes its own part of every batch,
DistributedDataParallel averages the gradients while backward is still running, and so all take the same step.

What keeps a long job alive is layered around the mechanism, in ddp/resilience/: a guard around each step, a supervisor
around the loop. A reader who skips both misses nothing of the lesson. Read this file beside ddp/README.md.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from common.cli import command, parse
from common.data.datasets import Batch, ImageData
from common.distributed.process_group import (
    DistEnv,
    clean_exit,
    find_dist_env,
    rendezvous_errors,
    rendezvous_store,
)
from common.distributed.rank_logging import rank_logging
from common.training.evaluation import Evaluation, evaluate
from common.training.models import build_model
from common.training.optimization import build_optimizer, set_learning_rate
from common.training.precision import autocast
from common.training.randomness import derive_seed, seed_torch
from common.training.window import WindowTotals
from ddp.batchnorm import average_running_statistics, convert_sync_batchnorm
from ddp.by_hand.replicas import require_same_modules
from ddp.checkpoint.state import restore
from ddp.checkpoint.storage import load_weights
from ddp.config import TrainConfig
from ddp.data import load_data, open_loader, open_test_loader
from ddp.job import Job
from ddp.resilience.guard import ResilientGuard
from ddp.resilience.resume import Found, open_run
from ddp.resilience.supervisor import AFTER_THE_WATCHDOG_S, Supervisor
from ddp.sampler import MicroBatchSampler
from ddp.step_guard import StepGuard

logger = logging.getLogger("ddp.train")


@command
def main() -> None:
    config = parse(TrainConfig, "ddp.train", __doc__)
    env = find_dist_env(config.device, config.backend)  # torchrun tells each process its rank through the environment
    if env.device.type == "cuda":
        torch.cuda.set_device(env.device)  # before the first use of CUDA: it would go to GPU 0 on every rank
    torch.set_num_threads(config.threads or env.share_of_cores)
    with clean_exit(env), rank_logging(env):
        with rendezvous_errors(env):
            dist.init_process_group(
                env.backend,  # NCCL on GPUs, gloo on CPUs
                store=rendezvous_store(env, config.timeout),  # where the ranks find each other's addresses
                rank=env.rank,
                world_size=env.world_size,
                timeout=datetime.timedelta(seconds=config.timeout + AFTER_THE_WATCHDOG_S),
                device_id=env.nccl_device,
            )
        train(config, env)
        dist.destroy_process_group()


def train(config: TrainConfig, env: DistEnv) -> None:
    """The whole run on one rank, from an empty directory or the newest checkpoint to the figures."""
    with env.fail_together():  # what is wrong on one rank ends all ranks, with one message
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
                supervisor.checkpointer.save(job)  # rank 0 writes, since all ranks hold the same weights
            supervisor.checkpointer.finish()
            result = result or test(job, supervisor)  # a run that was resumed after its last epoch
        supervisor.report(result)  # rank 0 draws and prints


def build_job(
    config: TrainConfig, env: DistEnv, data: ImageData, found: Found | None = None, guard: StepGuard | None = None
) -> Job:
    """Model, optimizer, sampler and loader: the same on every rank, but for the samples that it takes.

    :param found: the checkpoint to continue from. Rank 0 reads its weights, and DDP sends them to all
    :param guard: around each step; that of ddp/resilience/guard.py when None
    """
    torch.manual_seed(derive_seed(config.seed, "weights"))
    network = build_model(config.model, data.shape, len(data.classes), config.dropout)
    if config.sync_batchnorm:
        network = convert_sync_batchnorm(network, env.device)
    network = network.to(env.device, memory_format=config.memory_format)  # type: ignore[call-overload]
    with env.fail_together():
        if found is not None and env.is_main:
            load_weights(network, found.path)
    guard = guard or ResilientGuard(env)
    model = wrap(guard.wrap(network), env, config.strategy, config.all_reduce)
    if config.compile:
        model = torch.compile(model)  # type: ignore[assignment]

    accumulation = config.grad_accumulation_steps
    sampler = MicroBatchSampler(data.train, config.batch_size, accumulation, env.world_size, env.rank, config.seed)
    loader = open_loader(data.train, sampler, env.device, config.loading)
    test_loader = open_test_loader(data, env, config.loading)
    optimizer = build_optimizer(
        config.optimizer, network.parameters(), momentum=config.momentum, weight_decay=config.weight_decay
    )
    # In fp16, gradients below 6e-8 would become zero: the scaler multiplies the loss and divides the gradients. It does
    # nothing in fp32 and bf16, so that the step reads the same in all three.
    scaler = torch.amp.GradScaler(env.device.type, enabled=config.precision == "fp16")
    job = Job(config, env, data, network, model, optimizer, scaler, sampler, loader, test_loader, guard)
    guard.begin(job)
    return job


def wrap(module: nn.Module, env: DistEnv, strategy: str = "torch", all_reduce: str | None = None) -> nn.Module:
    """The module in DDP, which from here on averages its gradients over the ranks in every backward pass.

    :param strategy: one of :data:`ddp.config.STRATEGIES`
    :param all_reduce: of the hand-written one, see ddp/all_reduce/choice.py
    :raises UsageError: on every rank, if the ranks have built different models or were given different strategies
    """
    require_same_modules(module, {"--strategy": strategy, "--all-reduce": all_reduce})
    if strategy != "torch":
        from ddp.by_hand.strategies import wrap_by_hand  # the same mechanism, in Python that can be read

        return wrap_by_hand(module, env, strategy, all_reduce)
    model = DistributedDataParallel(  # broadcasts rank 0's weights to all ranks
        module,
        device_ids=[env.device] if env.device.type == "cuda" else None,
        gradient_as_bucket_view=True,  # .grad is a view into the bucket that is all-reduced: no copy, no second buffer
    )
    # BatchNorm's running statistics need not be broadcast before each forward pass: they are averaged once per epoch.
    # (Set here, because the constructor's argument has another name since torch 2.15.)
    model.broadcast_buffers = False
    return model


def train_epoch(job: Job, after_step: Callable[[], None] = lambda: None) -> WindowTotals:
    """One pass over the training set, or over what is left of it when the run was resumed inside an epoch."""
    job.sampler.set_epoch(job.epoch, first_step=job.step_in_epoch)  # without it, every epoch has the same order
    job.model.train()
    batches = job.window.timed(job.guard.batches(job.loader))
    while job.step_in_epoch < job.sampler.steps_per_epoch:
        train_step(job, batches)
        last = job.step_in_epoch == job.sampler.steps_per_epoch
        if job.step % job.config.log_every == 0 or last:
            job.log_window()
        if last:
            average_running_statistics(job.network)  # each rank's are of its own samples; see ddp/batchnorm.py
        after_step()
    next(batches, None)  # persistent workers stay for the next epoch only if this one is seen to its end
    return WindowTotals.merge(job.windows)


def train_step(job: Job, batches: Iterator[Batch]) -> None:
    """One optimizer step on one global batch: forward and backward of this rank's micro-batches, then the update."""
    config, device, scaler, guard = job.config, job.env.device, job.scaler, job.guard
    for micro_step in range(config.grad_accumulation_steps):
        images, labels = next(batches)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        seed_torch(device, config.seed, "dropout", job.step, micro_step, job.env.rank)

        # DDP decides in forward whether the next backward synchronizes, so no_sync must cover both. Only the last
        # micro-step's backward averages over the ranks, and what it averages is the sum of all micro-steps.
        last = micro_step == config.grad_accumulation_steps - 1
        with contextlib.nullcontext() if last else job.model.no_sync():
            with autocast(device, config.precision):
                logits = job.model(job.data.to_input(images, config.memory_format))
                loss = F.cross_entropy(logits.float(), labels, label_smoothing=config.label_smoothing)
            scaler.scale(guard.attach(loss) / config.grad_accumulation_steps).backward()
        job.window.add(loss, logits, labels)

    # Every rank holds the same averaged gradients now, and so the same norm. Unscale before the clip: the norm of scaled
    # gradients means nothing.
    scaler.unscale_(job.optimizer)
    norm = clip_grad_norm_(job.network.parameters(), config.clip_norm or math.inf)
    set_learning_rate(job.optimizer, config.rate_at(job.step, job.sampler.steps_per_epoch))
    if guard.accepts(norm):  # the same answer on every rank
        scaler.step(job.optimizer)  # skips by itself what overflowed in fp16, and update() then lowers the scale
    scaler.update()
    job.optimizer.zero_grad(set_to_none=True)
    job.step += 1


def test(job: Job, supervisor: Supervisor) -> Evaluation:
    """Evaluate the plain network: its samples divided over the ranks without padding, so that each counts once."""
    shard = supervisor.until_stopped(job.test_loader)
    result = evaluate(job.network, job.data, job.env, job.config.precision, shard)
    supervisor.leave_if_stopped()
    return result


if __name__ == "__main__":
    main()
