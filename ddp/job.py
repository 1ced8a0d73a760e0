"""What a rank trains with: the network wrapped by DDP, the optimizer, and the loader of its part of every batch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.data.datasets import Batch, ImageData
from common.distributed.process_group import DistEnv
from common.errors import UsageError
from common.reporting.report import Window, WindowTotals
from common.resilience.watchdog import Watchdog
from common.training.metrics import MetricsWriter
from common.training.models import build_model
from common.training.optimization import build_optimizer
from common.training.precision import Precision
from common.training.randomness import derive_seed
from ddp.all_reduce.choice import build_all_reduce
from ddp.batchnorm import KeptStatistics, convert_sync_batchnorm
from ddp.by_hand.replicas import require_same_modules
from ddp.by_hand.wrapper import HandwrittenDistributedDataParallel
from ddp.checkpoint import storage
from ddp.checkpoint.manifest import name_of
from ddp.config import TrainConfig
from ddp.data import Loader, open_loader
from ddp.evaluate import open_test_loader
from ddp.resilience.flags import NO_FLAGS, FlagCarrier, raise_flags
from ddp.sampler import MicroBatchSampler

NoSync = Callable[[], contextlib.AbstractContextManager[None]]


@dataclasses.dataclass
class Job:
    """What is trained, with what, and how far it is.

    ``network`` is the plain module; ``carrier`` has it and the ranks' flags; ``model`` is that, wrapped by DDP, and
    ``no_sync`` DDP's context in which a backward pass keeps its gradients to itself.
    """

    config: TrainConfig
    env: DistEnv
    data: ImageData
    network: nn.Module
    carrier: FlagCarrier
    model: nn.Module
    no_sync: NoSync
    optimizer: torch.optim.Optimizer
    precision: Precision
    sampler: MicroBatchSampler
    loader: Loader
    test_loader: Loader
    statistics: KeptStatistics
    window: Window
    watchdog: Watchdog
    metrics: MetricsWriter | None = None

    step: int = 0  # optimizer steps done, over all epochs
    epoch: int = 0  # epochs done, with their evaluation
    windows: list[WindowTotals] = dataclasses.field(default_factory=list)  # of the present epoch
    skipped_steps: int = 0
    accuracy: float | None = None  # of the last evaluation
    best: dict[str, Any] | None = None  # the checkpoint of the best one: its "name" and "accuracy"
    user_error: UsageError | None = None  # what this rank has met in the middle of a step

    @property
    def position(self) -> int:
        """Optimizer steps done in the present epoch."""
        return self.step - self.epoch * self.sampler.steps_per_epoch

    def record(self, kind: str, **values: Any) -> None:
        """Write down something about the step that is just over, if this rank does, and there is a run directory."""
        try:
            if self.metrics is not None:
                self.metrics.write(kind, self.step, epoch=self.epoch, **values)
        except UsageError as error:  # rank 0's disk is full, which the others learn in the next step
            self.user_error = error

    def end_epoch(self, accuracy: float) -> None:
        """The present epoch is over; its checkpoint, which is to be written next, may be the best."""
        self.epoch += 1
        self.windows = []
        self.accuracy = accuracy
        if self.best is None or accuracy > self.best["accuracy"]:
            self.best = {"name": name_of(self.epoch, self.step), "accuracy": accuracy}


def build_job(config: TrainConfig, env: DistEnv, data: ImageData, checkpoint: Path | None = None) -> Job:
    """Model, optimizer, sampler and loader, the same on every rank but for the samples it takes.

    :param checkpoint: whose weights to begin with. Rank 0 reads them, and DDP sends them to all when it is constructed
    """
    torch.manual_seed(derive_seed(config.seed, "weights"))
    network = build_model(config.model, data.shape, len(data.classes), config.dropout)
    if config.sync_batchnorm:
        network = convert_sync_batchnorm(network, env.device)
    network = network.to(env.device, memory_format=config.memory_format)  # type: ignore[call-overload]
    with env.fail_together():
        if checkpoint is not None and env.is_main:
            storage.load_weights(network, checkpoint)
    carrier = FlagCarrier(network, env.device)
    model: nn.Module = carrier
    no_sync: NoSync = contextlib.nullcontext
    if env.world_size > 1:  # alone, there is nobody to average with
        model = wrap(carrier, env, config.strategy, config.all_reduce)
        no_sync = model.no_sync
    if config.compile:
        model = cast(nn.Module, torch.compile(model))  # a wrapper: evaluation calls the plain network

    sampler = MicroBatchSampler(
        data.train, config.batch_size, config.grad_accumulation_steps, env.world_size, env.rank, config.seed
    )
    loader = open_loader(data.train, sampler, env.device, config.loading)
    test_loader = open_test_loader(data, env, config.loading)
    optimizer = build_optimizer(
        config.optimizer, network.parameters(), momentum=config.momentum, weight_decay=config.weight_decay
    )
    precision = Precision(config.precision, env.device)
    job = Job(
        config, env, data, network, carrier, model, no_sync, optimizer, precision, sampler, loader, test_loader,
        KeptStatistics(network), Window(env.device), Watchdog(env, config.timeout),
    )  # fmt: skip
    if env.world_size > 1:
        warm_up(job)
    return job


def wrap(
    module: nn.Module, env: DistEnv, strategy: str = "torch", all_reduce: str | None = None
) -> DistributedDataParallel | HandwrittenDistributedDataParallel:
    """The module in DDP, which from here on averages its gradients over the ranks in every backward pass.

    :param strategy: of :data:`ddp.config.STRATEGIES`; :param all_reduce: of the hand-written one, see ddp/all_reduce/choice.py
    :raises UsageError: on every rank, if they were told to train different models, or to sum by hand what is on a GPU
    """
    group = dist.group.WORLD
    assert group is not None
    require_same_modules(module, {"--strategy": strategy, "--all-reduce": all_reduce}, group)
    device_ids = [env.device] if env.device.type == "cuda" else None
    if strategy == "handwritten":
        all_reduce = all_reduce or "backend"
        if device_ids and all_reduce != "backend":
            raise UsageError(f"--all-reduce {all_reduce} sums tensors of the CPU, not of {env.device}: use backend")
        with env.fail_together():  # shared memory may be short on one host
            summing = build_all_reduce(all_reduce)
        with env.fail_together():
            return HandwrittenDistributedDataParallel(module, device_ids, broadcast_buffers=False, all_reduce=summing)
    model = DistributedDataParallel(
        module,
        device_ids=device_ids,
        gradient_as_bucket_view=True,  # .grad is a view into the bucket that travels: no copy, and no second buffer
    )
    # Rank 0's running statistics need not be sent before each forward pass: they are averaged when they are needed.
    # (Set here, because the constructor's argument has another name since torch 2.15.)
    model.broadcast_buffers = False
    return model


def warm_up(job: Job) -> None:
    """One backward pass that is thrown away, so that DDP's buckets are final before the first step.

    DDP regroups its buckets after the first backward pass, in the order in which gradients became ready. With three ranks
    or more, the order in which a gradient is summed over the ranks depends on its place in the bucket; a resumed run, whose
    first step is not the first, would otherwise differ in the last bit.
    """
    job.statistics.keep()
    images = empty_batch(job).images.to(job.env.device)
    with job.precision.autocast():
        logits, flags = job.model(job.data.to_input(images, job.config.memory_format))
    raise_flags(logits.float().sum(), flags, NO_FLAGS).backward()
    job.carrier.agreed()
    job.optimizer.zero_grad(set_to_none=True)
    job.statistics.put_back()


def empty_batch(job: Job) -> Batch:
    """A micro-batch of black images."""
    size = job.sampler.micro_batch_size
    return Batch(torch.zeros(size, *job.data.shape, dtype=torch.uint8), torch.zeros(size, dtype=torch.int64))
