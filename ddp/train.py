"""Train a network on every device at once, with nothing but torch.distributed between you and the mechanism.

    torchrun --nproc_per_node=2 -m ddp.train

One process per device runs this file from top to bottom. All hold the same weights; each takes its own part of every
batch, DistributedDataParallel averages the gradients while the backward pass is still running, and so all take the same
step. Read it beside ddp/README.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from common.cli import UsageError, command, parse
from common.datasets import Batch, ImageData
from common.evaluation import evaluate
from common.metrics import MetricsWriter, check_tensorboard
from common.models import LEAST_SAMPLES, build_model
from common.optimization import build_optimizer
from common.precision import Precision, clip_gradients
from common.process_group import Place, process_group
from common.profiling import profile_steps
from common.randomness import derive_seed, seed_torch
from common.rank_logging import Progress, add_log_file, rank_logging
from common.report import Window, WindowTotals, finish
from common.run_directory import CONFIG_FILE, LOG_FOLDER, prepare, require_writable, write_json
from dataloading.failures import explained
from ddp import checkpoint
from ddp.algorithms import build_all_reduce
from ddp.batchnorm import average_running_statistics, convert_sync_batchnorm
from ddp.config import TrainConfig, micro_batch_size
from ddp.data import Loader, load_data, open_loader
from ddp.evaluate import open_test_loader
from ddp.handwritten import HandwrittenDistributedDataParallel
from ddp.replicas import require_same_modules
from ddp.report import describe_run, faster_loading
from ddp.sampler import MicroBatchSampler

logger = logging.getLogger("ddp.train")

NoSync = Callable[[], contextlib.AbstractContextManager[None]]


@command
def main() -> None:
    config = parse(TrainConfig, "ddp.train", __doc__)
    # From here on there are as many of us as torchrun started. The process group is how we find each other.
    with process_group(config.device, config.backend, config.timeout, config.threads) as place, rank_logging(place):
        train(config, place)


def train(config: TrainConfig, place: Place) -> None:
    """The whole run: what every rank does, from an empty directory to the figures."""
    with place.together():  # what one rank finds wrong ends all
        samples = micro_batch_size(config.batch_size, place.world_size, config.micro_steps)
        if samples < LEAST_SAMPLES.get(config.model, 1):
            raise UsageError(
                f"{config.model} cannot normalize a single sample per rank and micro-step: use a larger --batch-size"
            )
        if config.tensorboard:
            check_tensorboard()
    data = load_data(config, place)
    with place.together():  # last of all checks, since it may delete the run that was there
        if place.is_main:
            prepare(config.run_dir, resume=config.resume, overwrite=config.overwrite)
            if not config.resume:
                write_json(config.run_dir / CONFIG_FILE, describe_run(config, place, data))
    with place.together():  # on every node
        require_writable(config.run_dir)
    add_log_file(place, config.run_dir / LOG_FOLDER)

    job = build_job(config, place, data)
    first_epoch = resume(job) if config.resume else 0
    logger.info(
        f"{config.model} on {config.dataset}: {place.world_size} ranks x {config.micro_steps} micro-steps x "
        f"{samples} samples, {config.precision}, {place.backend}"
    )

    result = None
    with (
        MetricsWriter(
            config.run_dir,
            after_step=job.step if config.resume else None,
            tensorboard=config.tensorboard,
            silent=not place.is_main,
        ) as metrics,
        Progress(place, "train", config.epochs * job.sampler.steps_per_epoch, job.step) as progress,
        profile_steps(place, config.run_dir / "profile" if config.profile else None) as step_done,
    ):
        for epoch in range(first_epoch, config.epochs):
            totals = train_epoch(job, epoch, metrics, progress, step_done)
            average_running_statistics(job.network)  # the ranks' own differ; see ddp/batchnorm.py
            result = evaluate(job.network, data, place, job.precision, job.test_loader)
            tested = {"test_loss": result.loss, "test_accuracy": result.accuracy}
            metrics.write("epoch", job.step, epoch=epoch, **totals.as_record(), **tested)
            with place.together():
                if place.is_main:
                    checkpoint.save(config.run_dir, snapshot(job, epoch + 1), config.keep_last)
            logger.info(
                f"epoch {epoch + 1} of {config.epochs}: train loss {totals.loss:.4f}, test loss {result.loss:.4f}, "
                f"test accuracy {100 * result.accuracy:.2f} %, {totals.images_per_s:,.0f} images/s"
            )

    # None when it was resumed after its last epoch.
    result = result or evaluate(job.network, data, place, job.precision, job.test_loader)
    with place.together():  # nobody leaves while rank 0 still draws
        if place.is_main:
            title = f"{config.model} on {config.dataset}, {place.world_size} ranks, {config.precision}"
            summary = finish(config.run_dir, title, job.network, data, place, result, faster_loading(config))
            print(summary, flush=True)


@dataclasses.dataclass
class Job:
    """What a training step needs. ``network`` is the plain module; ``model`` is the same, wrapped by DDP, and ``no_sync``
    DDP's context in which a backward pass keeps its gradients to itself."""

    config: TrainConfig
    place: Place
    data: ImageData
    network: nn.Module
    model: nn.Module
    no_sync: NoSync
    optimizer: torch.optim.Optimizer
    precision: Precision
    sampler: MicroBatchSampler
    loader: Loader
    test_loader: Loader
    step: int = 0  # optimizer steps done, over all epochs


def build_job(config: TrainConfig, place: Place, data: ImageData) -> Job:
    """Model, optimizer, sampler and loader, the same on every rank but for the samples it takes."""
    torch.manual_seed(derive_seed(config.seed, "weights"))
    network = build_model(config.model, data.shape, len(data.classes), config.dropout)
    if config.sync_batchnorm:
        network = convert_sync_batchnorm(network, place.device)
    network = network.to(place.device, memory_format=config.memory_format)  # type: ignore[call-overload]
    model: nn.Module = network
    no_sync: NoSync = contextlib.nullcontext
    if place.world_size > 1:  # alone, there is nobody to average with
        model = wrap(network, place, config.strategy, config.all_reduce)
        no_sync = model.no_sync
    if config.compile:
        model = cast(nn.Module, torch.compile(model))  # a wrapper: evaluation calls the plain network

    sampler = MicroBatchSampler(
        data.train, config.batch_size, config.micro_steps, place.world_size, place.rank, config.seed
    )
    loader = open_loader(data.train, sampler, place.device, config.loading)
    test_loader = open_test_loader(data, place, config.loading)
    optimizer = build_optimizer(
        config.optimizer, network.parameters(), momentum=config.momentum, weight_decay=config.weight_decay
    )
    precision = Precision(config.precision, place.device)
    job = Job(config, place, data, network, model, no_sync, optimizer, precision, sampler, loader, test_loader)
    if place.world_size > 1:
        settle_buckets(job)
    return job


def wrap(
    network: nn.Module, place: Place, strategy: str = "torch", all_reduce: str | None = None
) -> DistributedDataParallel | HandwrittenDistributedDataParallel:
    """The network in DDP, which from here on averages its gradients over the ranks in every backward pass.

    :param strategy: of :data:`ddp.config.STRATEGIES`; :param all_reduce: of the hand-written one, see ddp/algorithms.py
    :raises UsageError: on every rank, if they were told to train different models, or to sum by hand what is on a GPU
    """
    group = dist.group.WORLD
    assert group is not None
    require_same_modules(network, {"--strategy": strategy, "--all-reduce": all_reduce}, group)
    device_ids = [place.device] if place.device.type == "cuda" else None
    if strategy == "handwritten":
        all_reduce = all_reduce or "backend"
        if device_ids and all_reduce != "backend":
            raise UsageError(f"--all-reduce {all_reduce} sums tensors of the CPU, not of {place.device}: use backend")
        with place.together():  # shared memory may be short on one host
            summing = build_all_reduce(all_reduce)
        with place.together():
            return HandwrittenDistributedDataParallel(network, device_ids, broadcast_buffers=False, all_reduce=summing)
    model = DistributedDataParallel(
        network,
        device_ids=device_ids,
        gradient_as_bucket_view=True,  # .grad is a view into the bucket that travels: no copy, and no second buffer
    )
    # Rank 0's running statistics need not be sent before each forward pass: they are averaged when they are needed.
    # (Set here, because the constructor's argument has another name since torch 2.15.)
    model.broadcast_buffers = False
    return model


def settle_buckets(job: Job) -> None:
    """One backward pass that is thrown away, so that DDP's buckets are final before the first step.

    DDP regroups its buckets after the first backward pass, in the order in which gradients became ready. With three ranks
    or more, the order in which a gradient is summed over the ranks depends on its place in the bucket; a resumed run, whose
    first step is not the first, would otherwise differ in the last bit.
    """
    buffers = [buffer.clone() for buffer in job.network.buffers()]
    images = empty_batch(job).images.to(job.place.device)
    with job.precision.autocast():
        logits = job.model(job.data.to_input(images, job.config.memory_format))
    logits.float().sum().backward()
    job.optimizer.zero_grad(set_to_none=True)
    for buffer, before in zip(job.network.buffers(), buffers, strict=True):
        buffer.copy_(before)


def train_epoch(
    job: Job,
    epoch: int,
    metrics: MetricsWriter | None = None,
    progress: Progress | None = None,
    step_done: Callable[[], None] = lambda: None,
) -> WindowTotals:
    """One pass over the training set; every ``log_every`` steps the ranks add up what they saw."""
    job.sampler.set_epoch(epoch)  # another order, and other augmentations; without it every epoch repeats the first
    job.model.train()
    window, windows = Window(job.place.device), []
    batches = batches_of(job, window)
    steps_before = job.step
    for remaining in reversed(range(job.sampler.steps_per_epoch)):
        train_step(job, batches, window)
        step_done()
        if job.step % job.config.log_every == 0 or remaining == 0:
            totals = window.reduce(job.place)
            windows.append(totals)
            if not math.isfinite(totals.loss) and job.place.is_main:
                logger.warning(f"the loss is {totals.loss} at step {job.step}: a lower --lr or --clip-norm may help")
            rate = job.optimizer.param_groups[0]["lr"]
            if metrics is not None:
                scale = job.precision.scaler.get_scale()
                metrics.write("step", job.step, epoch=epoch, learning_rate=rate, loss_scale=scale, **totals.as_record())
            if progress is not None:
                progress.advance(
                    job.step - steps_before,
                    f"loss {totals.loss:.3f}, lr {rate:.2g}, {totals.images_per_s:,.0f} images/s",
                )
            steps_before = job.step
    next(batches, None)  # workers stay for the next epoch only if this one is seen to its end
    return WindowTotals.merge(windows)


def batches_of(job: Job, window: Window) -> Iterator[Batch]:
    """This rank's micro-batches of an epoch.

    A damaged file is found by one rank, when the others may already wait for its gradients. So it goes on with empty
    images, to where the window ends and all can stop together.
    """
    try:
        with explained():  # a loader worker that was killed, a full /dev/shm
            yield from job.loader
    except UsageError as error:
        window.mistake = error
        while True:
            yield empty_batch(job)


def empty_batch(job: Job) -> Batch:
    """A micro-batch of black images."""
    size = job.sampler.micro_batch_size
    return Batch(torch.zeros(size, *job.data.shape, dtype=torch.uint8), torch.zeros(size, dtype=torch.int64))


def train_step(job: Job, batches: Iterator[Batch], window: Window) -> None:
    """One optimizer step on one global batch: this rank's micro-batches of it, forward and backward, then the update."""
    config, device, scaler = job.config, job.place.device, job.precision.scaler
    for micro_step in range(config.micro_steps):
        with record_function("data"), window.waiting():
            images, labels = next(batches)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        seed_torch(device, config.seed, "dropout", job.step, micro_step, job.place.rank)

        # DDP decides in forward whether the backward pass that follows will synchronize, so no_sync must cover both. Only
        # the last micro-step's backward averages over the ranks, and what it averages is the sum of all.
        synchronize = micro_step == config.micro_steps - 1
        with contextlib.nullcontext() if synchronize else job.no_sync():
            with record_function("forward"), job.precision.autocast():
                logits = job.model(job.data.to_input(images, config.memory_format))
                loss = F.cross_entropy(logits.float(), labels, label_smoothing=config.label_smoothing)
            with record_function("backward"):
                scaler.scale(loss / config.micro_steps).backward()
        window.add(loss, logits, labels)

    with record_function("optimizer"):
        if config.clip_norm is not None:
            scaler.unscale_(job.optimizer)  # first: the norm of scaled gradients means nothing
            clip_gradients(job.network.parameters(), config.clip_norm)
        for group in job.optimizer.param_groups:
            group["lr"] = config.rate_at(job.step, job.sampler.steps_per_epoch)
        # If a gradient is inf or nan, the scaler skips the step: on all ranks alike, since they hold the same gradients.
        scaler.step(job.optimizer)
        scaler.update()
        job.optimizer.zero_grad(set_to_none=True)
    job.step += 1


def snapshot(job: Job, epochs_done: int) -> checkpoint.Checkpoint:
    """All that a run needs to continue bit for bit; the rest follows from these integers and the seed."""
    return {
        "format": checkpoint.FORMAT,
        "epoch": epochs_done,
        "step": job.step,
        "model": job.network.state_dict(),  # of the plain module: no "module." in its keys
        "optimizer": job.optimizer.state_dict(),
        "scaler": job.precision.scaler.state_dict(),
        "config": job.config.as_json(),
    }


def resume(job: Job) -> int:
    """Put the newest checkpoint into the job; returns the epochs that are done."""
    loaded = checkpoint.load_together(job.config.run_dir, job.place)
    for difference in checkpoint.check_identity(loaded, job.config.as_json()):
        logger.info("resuming with other settings: %s", difference)
    if loaded["epoch"] > job.config.epochs:
        raise UsageError(f"--epochs {job.config.epochs} is less than the {loaded['epoch']} that the run has behind it")
    hyperparameters = [{k: v for k, v in group.items() if k != "params"} for group in job.optimizer.param_groups]
    checkpoint.load_model(job.network, loaded)
    job.optimizer.load_state_dict(loaded["optimizer"])
    for group, own in zip(job.optimizer.param_groups, hyperparameters, strict=True):
        group.update(own)  # this run's weight decay and momentum, should they have been changed
    if loaded["scaler"]:  # empty if the run was not in fp16 until now
        job.precision.scaler.load_state_dict(loaded["scaler"])
    job.step = loaded["step"]
    logger.info("resuming after epoch %d, step %d", loaded["epoch"], loaded["step"])
    return loaded["epoch"]


if __name__ == "__main__":
    main()
