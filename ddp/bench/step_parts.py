"""The parts of a training step's time, computed from the clocks of all ranks.

Every rank records five moments of each step. All processes of a machine share the clock:

    began --- input --- compute --- ready --- wait --- reduced --- update --- ended

At ``ready`` the rank's last bucket of gradients is complete, and its all-reduce starts (a communication hook sees this). At
``reduced`` the optimizer begins: all buckets are averaged, and the gradients were checked. Between the two the rank waits.
Until the slowest rank is ready, the wait is *imbalance*; after that it is exposed *communication*. All-reduces that ran
while gradients were still computed do not appear: that is DDP's overlap. (On the CPU, overlap is not free: gloo's threads
run on the same cores, and their time appears in *compute*.)

What holds up the backward pass before ``ready`` is no *compute* either. One implementation of NCCL makes it wait for each bucket
(common/gpu/devices.py). Data parallelism in one process communicates by copying: scatter, replicate, gather and reduce. Both count as
*communication*, the second on CPU devices alone: on GPUs it cannot be separated from *compute* without a synchronization between the steps
(dataparallel.bench does that).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.data.datasets import Batch, ImageData
from common.distributed.process_group import DistEnv
from common.reporting.timing import synchronize
from dataparallel.bench.stopwatch import Stopwatch
from dataparallel.parallel import HandwrittenDataParallel
from ddp.bench.overhead import endless_batches
from ddp.config import TrainConfig
from ddp.train import build_job, train_step

COPYING = ("scatter", "replicate", "gather", "reduce")


@dataclass
class Stamps:
    """A step's moments on one rank, in seconds of ``time.perf_counter``, which all processes of a machine share.

    ``input`` and ``stalled`` are durations; in the second, computing waited for copies or all-reduces before ``ready``.
    """

    began: float
    input: float = 0.0
    ready: float = 0.0
    reduced: float = 0.0
    ended: float = 0.0
    stalled: float = 0.0


class StepParts(NamedTuple):
    """Seconds per step, means over ranks and steps; they add up to the whole step.

    :param input: wait for the batch
    :param compute: forward and backward
    :param imbalance: wait for slower ranks
    :param communication: exposed all-reduce
    :param update: optimizer and metrics
    """

    input: float
    compute: float
    imbalance: float
    communication: float
    update: float

    @classmethod
    def of(cls, ranks: Sequence[Sequence[Stamps]]) -> StepParts:
        """Compute the means.

        :param ranks: for each rank the stamps of the same steps
        """
        parts = []
        for step in zip(*ranks, strict=True):
            all_ready = max(stamps.ready for stamps in step)
            for stamps in step:
                computed = stamps.ready - stamps.began - stamps.input - stamps.stalled
                waited, exposed = all_ready - stamps.ready, stamps.reduced - all_ready + stamps.stalled
                parts.append((stamps.input, computed, waited, exposed, stamps.ended - stamps.reduced))
        return cls(*map(statistics.fmean, zip(*parts, strict=True)))


class Runner:
    """The service of one rank: the job of ``ddp.train``, which records the moments of each step.

    :param wrapper: ``"none"`` for the plain module, ``"handwritten"`` or ``"torch"`` for data parallelism in one process, or
        ``"ddp"``
    :param devices: number of devices of data parallelism in one process
    """

    def __init__(self, env: DistEnv, config: TrainConfig, data: ImageData, wrapper: str, devices: int) -> None:
        self._env = env
        self._job = job = build_job(config, env, data)
        self._stamps = Stamps(0.0)
        self._stopwatch: Stopwatch | None = None
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # of the backward pass's stream
        if wrapper == "ddp":
            # (torch wants the class itself in a hook's annotations, or none.)
            job.model.register_comm_hook(None, lambda state, bucket: self._average(bucket))
        else:
            job.model = job.model.module
        if wrapper == "torch":
            job.model = nn.DataParallel(job.model, list(range(devices)))
        elif wrapper == "handwritten":
            on_gpus = env.device.type == "cuda"
            job.model = HandwrittenDataParallel(job.model, [f"cuda:{i}" if on_gpus else "cpu" for i in range(devices)])
            if not on_gpus:  # there it would wait for them, which makes the step slower
                self._stopwatch = job.model.step = Stopwatch(job.model.devices)
        job.optimizer.register_step_pre_hook(self._before_update)
        job.model.train()
        self._batches = self._timed(endless_batches(job))

    def run(self, steps: int) -> list[Stamps]:
        """Take some steps. All ranks start together."""
        stamps = []
        dist.barrier()
        self._synchronize()
        for _ in range(steps):
            self._stamps = Stamps(time.perf_counter())
            train_step(self._job, self._batches)
            self._synchronize()
            self._stamps.ended = time.perf_counter()
            if self._stopwatch is not None:
                seconds = self._stopwatch.take()
                self._stamps.stalled = sum(seconds[step] for step in COPYING)
            self._stamps.stalled += sum(began.elapsed_time(ended) for began, ended in self._stalls) / 1e3
            self._stalls.clear()
            stamps.append(self._stamps)
        return stamps

    def _average(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """DDP's default communication hook. It also records the moment at which the last bucket is ready, and on a GPU, how long
        the backward pass waits for each of the others."""
        device = self._env.device
        if bucket.is_last():
            if device.type == "cuda":
                # Wait for the backward kernels, not for the all-reduces, which have a stream of their own.
                torch.cuda.current_stream(device).synchronize()
            self._stamps.ready = time.perf_counter()
        summed = dist.all_reduce(bucket.buffer().div_(self._env.world_size), async_op=True)
        if device.type == "cpu" or bucket.is_last():
            future = summed.get_future()
        else:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record(torch.cuda.current_stream(device))
            future = summed.get_future()  # here ProcessGroupNCCL2 makes the stream wait for the all-reduce
            ended.record(torch.cuda.current_stream(device))
            self._stalls.append((began, ended))
        return future.then(lambda summed: summed.value()[0])

    def _before_update(self, *_: Any) -> None:
        self._synchronize()
        self._stamps.reduced = time.perf_counter()
        self._stamps.ready = self._stamps.ready or self._stamps.reduced  # without DDP there is nothing to wait for

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            began = time.perf_counter()
            batch = next(batches)
            self._stamps.input += time.perf_counter() - began
            yield batch

    def _synchronize(self) -> None:
        synchronize([self._env.device])
