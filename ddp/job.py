"""The state of a training job on one rank, and the interface of what guards its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from common.data.datasets import Batch, ImageData, Loader
from common.distributed.dist_env import DistEnv
from common.distributed.rank_logging import Progress
from common.errors import UsageError
from common.training.metrics import MetricsWriter
from common.training.precision import LOW_DTYPES, autocast
from common.training.window import Window, WindowTotals, end_window
from ddp.config import TrainConfig
from ddp.peak_flops import peak_flops, training_flops
from ddp.sampler import MicroBatchSampler
from ddp.watchdog.watchdog import Watchdog


class StepGuard:
    """Three calls around a training step. This guard does nothing; ddp/resilience/guard.py keeps a job alive."""

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """This rank's micro-batches of an epoch."""
        return iter(loader)

    def report(self, losses: list[Tensor]) -> Tensor:
        """This rank's report of a step, float32 ``[flags]`` on the device: a number that is not 0 tells something.

        :param losses: 0-d, of the micro-steps
        """
        return losses[-1].new_zeros(1)

    def may_step(self, norm: Tensor | None, reports: Tensor) -> bool:
        """Whether the optimizer may be called; the same on every rank. On a GPU it may, even in a bad step: the device knows it,
        and changes nothing.

        :param norm: 0-d, of the averaged and unscaled gradients before they were clipped; None without clipping
        :param reports: the sum over the ranks
        """
        return True


@dataclasses.dataclass
class Job:
    """A training job: its parts, the same on every rank, and its progress.

    :param network: the module that is evaluated and saved; of a sharded strategy, the one that holds the shards
    :param model: the network in DDP, which training calls; of a sharded strategy, the network itself
    :param clip_grad_norm_: torch's; of a sharded strategy, one that knows that no rank has all gradients
    :param learning_rate: of an optimizer step, counted from 0 over all epochs
    :param guard: what surrounds each training step
    """

    config: TrainConfig
    env: DistEnv
    data: ImageData
    network: nn.Module
    model: Any  # a module with no_sync()
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    clip_grad_norm_: Callable[..., Tensor]
    learning_rate: Callable[[int], float]
    sampler: MicroBatchSampler
    loader: Loader
    test_loader: Loader
    guard: StepGuard = dataclasses.field(default_factory=StepGuard)

    step: int = 0  # optimizer steps done, over all epochs
    epoch: int = 0  # epochs done, with their evaluation
    windows: list[WindowTotals] = dataclasses.field(default_factory=list)  # of the present epoch
    skipped_steps: int = 0
    accuracy: float | None = None  # of the last evaluation
    best: dict[str, Any] | None = None  # the checkpoint with the best accuracy: its "name" and "accuracy"
    user_error: UsageError | None = None  # raised on this rank in the middle of a step
    metrics: MetricsWriter | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        self.memory_format = self.config.memory_format
        self.autocast_dtype = LOW_DTYPES.get(self.config.precision)  # None in fp32
        self.window = Window(self.env.device, self.config.grad_accumulation_steps)
        self.watchdog = Watchdog(self.env, self.config.timeout)

    @property
    def named_module(self) -> nn.Module:
        """The network without what holds its shards: its names are those of checkpoints, its parameters may be shards."""
        return self.network.module if self.config.is_sharded else self.network  # type: ignore[return-value]

    @property
    def step_in_epoch(self) -> int:
        """Optimizer steps done in the present epoch."""
        return self.step - self.epoch * self.sampler.steps_per_epoch

    def weigh_text(self, loss: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of a micro-batch of text, weighted so that each character of the global batch counts alike.

        Lines differ in length, so micro-batches differ in their number of characters. The sampler's order is known to all, so
        each rank counts the characters of the others without a message.

        :param loss: 0-d
        :param labels: of the micro-batch, int64 ``[n, length]``; negative where there is no character to predict
        :returns: 0-d. Its sum over the micro-steps, averaged over the ranks, is the mean over the global batch
        """
        of_global_batch = int((self.data.train.labels[self.sampler.global_batch(self.step_in_epoch)] >= 0).sum())
        # As many micro-batches like this one, on each rank, would be a global batch. (For images it is the number of micro-steps.)
        micro_steps = of_global_batch / (self.env.world_size * (labels >= 0).sum())
        return loss / micro_steps

    def measure_mfu(self) -> None:
        """Add the MFU to a GPU's metrics. A collective, if the network is sharded: it takes a forward pass."""
        if self.window.meter is None:
            return
        config, device = self.config, self.env.device
        images = self.empty_batch().images.to(device)
        with autocast(device, config.precision):
            flops = training_flops(self.network, self.data.to_input(images, config.memory_format))
        peak = peak_flops(torch.cuda.get_device_name(device), config.precision, config.tf32)
        self.window.meter.measure_mfu(flops, peak)

    def record(self, kind: str, step: int, **values: Any) -> None:
        """Write a record to ``metrics.jsonl``, on rank 0 of a run that has a directory."""
        try:
            if self.metrics is not None:
                self.metrics.write(kind, step, epoch=self.epoch, **values)
        except UsageError as error:  # rank 0's disk is full; the other ranks learn of it in the next step
            self.user_error = error

    def log_window(self) -> None:
        """Sum what the ranks saw since the last time, for the metrics and the progress bar."""
        totals = end_window(
            self.window, self.env, self.step, self.optimizer, self.scaler, self.record, self.progress, self.data.unit
        )
        self.windows.append(totals)

    @property
    def totals(self) -> WindowTotals:
        """The metrics of the present epoch until now."""
        return WindowTotals.merge(self.windows)

    def end_epoch(self, accuracy: float) -> None:
        """Count the present epoch as done, with the accuracy of its evaluation."""
        self.epoch += 1
        self.windows = []
        self.accuracy = accuracy

    def empty_batch(self) -> Batch:
        """A micro-batch of black images."""
        size, data = self.sampler.micro_batch_size, self.data
        return Batch(
            torch.zeros(size, *data.shape, dtype=torch.uint8), torch.zeros(size, *data.label_shape, dtype=torch.int64)
        )
