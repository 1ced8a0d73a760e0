"""The variants that the benchmark compares: calls that run one batch through one model.

Every variant begins with its batch in the CPU's memory, pinned where there are GPUs, so each includes its own transfer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.distributed.process_group import DistEnv
from common.distributed.worker_group import WorkerGroup
from common.reporting.turns import Step, calls_of_a_turn, timed_steps
from common.training.precision import autocast
from dataparallel.bench.config import DataParallelBenchConfig
from dataparallel.bench.stopwatch import Stopwatch
from dataparallel.broadcast import StepContext
from dataparallel.parallel import HandwrittenDataParallel
from dataparallel.threads import intra_op_threads

TURN_S = 0.06  # least length of a turn; one of a small batch takes many calls

PLAIN, TORCH, HANDWRITTEN, PROCESSES = "plain module", "nn.DataParallel", "handwritten", "processes"
ONE_DEVICE = "one CPU device"
STEP_BY_STEP = "handwritten, step by step"
NO_WATCH: StepContext = contextlib.nullcontext


def build_variants(
    config: DataParallelBenchConfig, mode: str, batch_size: int, timed: str, processes: WorkerGroup
) -> dict[str, TimedVariant]:
    """Build all variants for one of the modes and one batch size.

    :param timed: the variant whose steps are timed; on GPUs one of its own, which waits for them between the steps
    :param processes: one :class:`ReplicaWorker` per device
    """
    devices = config.parsed_devices
    first = devices[0]
    models: dict[str, nn.Module] = {PLAIN: OneDevice(config.build(first), first)}
    if config.on_cpu:
        models[ONE_DEVICE] = OneDevice(config.build(first), first)
    else:
        models[TORCH] = nn.DataParallel(config.build(first), list(devices))
        models[STEP_BY_STEP] = HandwrittenDataParallel(config.build(first), devices)
    models[HANDWRITTEN] = HandwrittenDataParallel(config.build(first), devices)
    variants = {}
    for name, model in models.items():
        stopwatch, watch = Stopwatch(devices), NO_WATCH
        if name == timed:
            model.step = watch = stopwatch  # type: ignore[assignment]
        call = call_of(model, mode, config.images(batch_size), first, config.precision, watch)
        threads = config.threads_of_one if name == ONE_DEVICE else torch.get_num_threads()
        variants[name] = TimedVariant(functools.partial(_timed, call, first, threads), stopwatch)
    on_ranks = functools.partial(_timed_on_ranks, processes, mode, batch_size)
    return variants | {PROCESSES: TimedVariant(on_ranks, Stopwatch(devices))}


class TimedVariant:
    """A variant's turn: a call returns the mean seconds of one call, and of each of its steps.

    :param run: does so many calls, and returns the mean seconds of one
    :param stopwatch: sums the seconds of the steps, if they are timed
    """

    def __init__(self, run: Callable[[int], float], stopwatch: Stopwatch) -> None:
        run(1)  # the first call is slower than the rest
        self._run, self._calls, self._stopwatch = run, calls_of_a_turn(run, TURN_S), stopwatch
        stopwatch.take()

    def __call__(self) -> tuple[float, dict[str, float]]:
        seconds = self._run(self._calls)
        return seconds, {name: total / self._calls for name, total in self._stopwatch.take().items()}


class ReplicaWorker:
    """The service of one rank: ``DistributedDataParallel`` instead of the four steps.

    Each process has its own interpreter and its own GIL, keeps its replica, and has its part of each batch.
    """

    def __init__(self, env: DistEnv, config: DataParallelBenchConfig) -> None:
        self._env, self._config = env, config
        self._model = OneDevice(config.build(env.device), env.device)
        self._ddp = DistributedDataParallel(self._model, gradient_as_bucket_view=True)
        self._ddp.broadcast_buffers = False  # the constructor's argument has another name since torch 2.15
        self._calls: dict[tuple[str, int], Step] = {}

    def run(self, mode: str, batch_size: int, calls: int) -> float:
        """Run this rank's part of a batch so often, and return the mean seconds. All ranks start together."""
        rank, ranks, device = self._env.rank, self._env.world_size, self._env.device
        if (mode, batch_size) not in self._calls:
            images = self._config.images((rank + 1) * batch_size // ranks - rank * batch_size // ranks)
            model = self._ddp if mode == "training" else self._model
            self._calls[mode, batch_size] = call_of(model, mode, images, device, self._config.precision)
        return timed_steps(self._calls[mode, batch_size], calls, device)[0]


class OneDevice(nn.Module):
    """The plain module, with the transfer of the batch to its device."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.module, self._device = module, device

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.module(images.to(self._device, non_blocking=True))
        return logits


def _timed(call: Step, device: torch.device, threads: int, calls: int) -> float:
    """The mean seconds of a call, with so many intra-op threads in this process.

    :param device: the first, where each call ends
    """
    with intra_op_threads(threads):
        return timed_steps(call, calls, device)[0]


def _timed_on_ranks(processes: WorkerGroup, mode: str, batch_size: int, calls: int) -> float:
    """The mean seconds of a call on the slowest rank."""
    seconds: list[float] = processes.call("run", mode, batch_size, calls)
    return max(seconds)


def call_of(
    model: nn.Module, mode: str, images: Tensor, device: torch.device, precision: str, watch: StepContext = NO_WATCH
) -> Step:
    """A function that classifies one batch, or takes one optimizer step on it.

    :param mode: of :data:`dataparallel.bench.config.MODES`
    :param images: on the CPU; the model moves them
    :param device: where the loss is computed
    :param watch: around the steps that are not the model's
    """
    model.train(mode == "training")
    labels = torch.zeros(len(images), dtype=torch.int64, device=device)
    # Weights that learn one batch by heart have denormal gradients, and those take Intel's cores ten times as long.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    def infer() -> None:
        with torch.inference_mode(), autocast(device, precision):
            model(images)

    def train() -> None:
        with autocast(device, precision):
            logits = model(images)
        with watch("loss"):
            loss = F.cross_entropy(logits.float(), labels)
        with watch("backward"):
            scaler.scale(loss).backward()
        with watch("optimizer"):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

    return train if mode == "training" else infer
