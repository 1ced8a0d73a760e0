"""The variants that the benchmark compares: calls that run one batch through one model.

Every variant begins with the batch in the CPU's memory, so each includes its own transfer. With GPUs the batch is pinned, and so
is the processes' copy, which lies in shared memory.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.reporting.timing import synchronize
from common.training.models import build_model
from common.training.precision import autocast
from dataparallel.bench.processes import ReplicaProcesses
from dataparallel.bench.stopwatch import Stopwatch
from dataparallel.broadcast import StepContext
from dataparallel.parallel import HandwrittenDataParallel
from dataparallel.threads import intra_op_threads, share_of_threads

CLASSES = 10
SHAPES = {"fashion-cnn": (1, 28, 28), "mlp": (1, 28, 28), "resnet18": (3, 64, 64), "resnet50": (3, 224, 224)}
MODES = ("inference", "training")
TIMING_S = 0.06  # least length of a timing; one of a small batch takes many calls
MOST_CALLS = 200

PLAIN, TORCH, HANDWRITTEN, PROCESSES = "plain module", "nn.DataParallel", "handwritten", "processes"
ONE_DEVICE = "one CPU device"
STEP_BY_STEP = "handwritten, step by step"


@dataclass(frozen=True)
class Comparison:
    """The settings that all batch sizes share.

    :param model: of :data:`common.training.models.MODELS`
    :param devices: GPUs, or the CPU several times
    :param precision: of :data:`common.training.precision.PRECISIONS`
    """

    model: str
    devices: tuple[torch.device, ...]
    precision: str

    @property
    def on_cpu(self) -> bool:
        return self.devices[0].type == "cpu"

    def build(self) -> nn.Module:
        """Build the model on the first device, with the same weights each time."""
        torch.manual_seed(0)
        return build_model(self.model, SHAPES[self.model], CLASSES).to(self.devices[0])

    @property
    def threads_of_one(self) -> int:
        """Intra-op threads of one CPU device."""
        return share_of_threads(len(self.devices))

    @property
    def megabytes(self) -> float:
        """Megabytes that replicate copies to each further device: parameters and buffers."""
        network = self.build()
        return sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers())) / 1e6

    def open_processes(self, largest: int) -> ReplicaProcesses:
        """Start one process per device, for batches of at most ``largest`` samples. The caller closes them."""
        shape, threads = SHAPES[self.model], self.threads_of_one
        return ReplicaProcesses(self.model, shape, CLASSES, largest, self.devices, self.precision, threads)

    def open(self, mode: str, batch_size: int, processes: ReplicaProcesses) -> dict[str, TimedVariant]:
        """Build all variants for one of :data:`MODES` and one batch size, and warm them up."""
        images = torch.randn(batch_size, *SHAPES[self.model])
        labels = torch.randint(CLASSES, (batch_size,))
        if not self.on_cpu:
            images, labels = images.pin_memory(), labels.pin_memory()

        def variant(model: nn.Module, threads: int | None = None, stopwatch: Stopwatch | None = None) -> TimedVariant:
            watch = stopwatch or (lambda name: contextlib.nullcontext())
            if mode == "inference":
                call = _inference(model, images, self.devices[0], self.precision)
            else:
                call = _training(model, images, labels.to(self.devices[0]), self.precision, watch)
            return TimedVariant(call, self.devices, threads, stopwatch)

        def handwritten(stopwatch: Stopwatch | None) -> TimedVariant:
            model = HandwrittenDataParallel(self.build(), self.devices)
            if stopwatch is not None:
                model.step = stopwatch
            return variant(model, stopwatch=stopwatch)

        stopwatch = Stopwatch(self.devices)
        found = {PLAIN: variant(_OneDevice(self.build(), self.devices[0]))}
        if self.on_cpu:
            found[ONE_DEVICE] = variant(_OneDevice(self.build(), self.devices[0]), threads=self.threads_of_one)
            if not torch.cuda.is_available():  # on a machine with a GPU, nn.DataParallel requires the module on it
                found[TORCH] = variant(nn.DataParallel(self.build()))
            found[HANDWRITTEN] = handwritten(stopwatch)
        else:
            found[TORCH] = variant(nn.DataParallel(self.build(), list(self.devices)))
            found[HANDWRITTEN] = handwritten(None)
            found[STEP_BY_STEP] = handwritten(stopwatch)  # waits for the GPUs between the steps
        found[PROCESSES] = self._of_processes(processes, mode, images, labels)
        return found

    def _of_processes(self, processes: ReplicaProcesses, mode: str, images: Tensor, labels: Tensor) -> TimedVariant:
        stopwatch = Stopwatch(self.devices)

        def call() -> None:
            seconds = processes.infer(images)[1] if mode == "inference" else processes.train(images, labels)
            stopwatch.seconds["forward"] += seconds

        return TimedVariant(call, self.devices, stopwatch=stopwatch)


class TimedVariant:
    """A variant that can be timed: a call returns the mean seconds of one run.

    :param call: runs the variant once
    :param devices: to be synchronized before the clock is read
    :param threads: intra-op threads during the call; None leaves them unchanged
    :param stopwatch: used by ``call``; its readings are appended to ``steps``: seconds per run, one entry per timing
    """

    def __init__(
        self,
        call: Callable[[], object],
        devices: Sequence[torch.device],
        threads: int | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self._call, self._threads, self._stopwatch = call, threads, stopwatch
        self._devices = devices
        self._calls = 1
        self.steps: list[dict[str, float]] = []
        self()  # the first call is slower than the rest
        self._calls = min(MOST_CALLS, math.ceil(TIMING_S / self()))
        self.steps.clear()

    def __call__(self) -> float:
        with intra_op_threads(self._threads or torch.get_num_threads()):
            synchronize(self._devices)
            began = time.perf_counter()
            for _ in range(self._calls):
                self._call()
            synchronize(self._devices)
            seconds = (time.perf_counter() - began) / self._calls
        if self._stopwatch is not None:
            self.steps.append({name: total / self._calls for name, total in self._stopwatch.take().items()})
        return seconds


class _OneDevice(nn.Module):
    """The plain module, with the transfer of the batch to its device."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.module, self._device = module, device

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.module(images.to(self._device, non_blocking=True))
        return logits


def _inference(model: nn.Module, images: Tensor, device: torch.device, precision: str) -> Callable[[], object]:
    model.eval()

    def call() -> object:
        with torch.inference_mode(), autocast(device, precision):
            return model(images)

    return call


def _training(
    model: nn.Module, images: Tensor, labels: Tensor, precision: str, watch: StepContext
) -> Callable[[], object]:
    """A function that takes one optimizer step. Labels are on the first device, where the loss is computed."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    device = labels.device
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    def call() -> None:
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

    return call
