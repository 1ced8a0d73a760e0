"""What the benchmark compares: ways to run one batch through one model, each a call that can be timed.

Every way begins with the batch in the CPU's memory, so that each pays for its own transfer. Where there are GPUs it is pinned,
but for the processes, whose memory is shared.
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
from dataparallel.bench.processes import Processes
from dataparallel.bench.stopwatch import Stopwatch
from dataparallel.broadcast import StepContext
from dataparallel.parallel import HandwrittenDataParallel
from dataparallel.threads import intra_op_threads, share_of_threads

CLASSES = 10
SHAPES = {"fashion-cnn": (1, 28, 28), "mlp": (1, 28, 28), "resnet18": (3, 64, 64)}
MODES = ("inference", "training")
# A timing takes as many calls as fit into this, so that one of a small batch can be trusted too.
TIMING_S = 0.06
MOST_CALLS = 200

PLAIN, TORCH, HANDWRITTEN, PROCESSES = "plain module", "nn.DataParallel", "handwritten", "processes"
ONE_DEVICE = "one CPU device"
STEP_BY_STEP = "handwritten, step by step"


@dataclass(frozen=True)
class Comparison:
    """What stays the same over all batch sizes.

    :param model: of :data:`common.training.models.MODELS`; :param precision: of :data:`common.training.precision.PRECISIONS`
    :param devices: GPUs, or the CPU several times
    """

    model: str
    devices: tuple[torch.device, ...]
    precision: str

    @property
    def on_cpu(self) -> bool:
        return self.devices[0].type == "cpu"

    def build(self) -> nn.Module:
        """The model, on the first device; the same weights each time."""
        torch.manual_seed(0)
        return build_model(self.model, SHAPES[self.model], CLASSES).to(self.devices[0])

    @property
    def threads_of_one(self) -> int:
        """Intra-op threads of one CPU device."""
        return share_of_threads(len(self.devices))

    @property
    def megabytes(self) -> float:
        """What replicate copies to each further device."""
        network = self.build()
        return sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers())) / 1e6

    def open_processes(self, largest: int) -> Processes:
        """One process per device, for batches of at most so many samples; to be closed."""
        shape, threads = SHAPES[self.model], self.threads_of_one
        return Processes(self.model, shape, CLASSES, largest, self.devices, self.precision, threads)

    def open(self, mode: str, batch_size: int, processes: Processes) -> dict[str, Candidate]:
        """All candidates for one of :data:`MODES` and one batch size, warmed up."""
        images = torch.randn(batch_size, *SHAPES[self.model])
        labels = torch.randint(CLASSES, (batch_size,))
        if not self.on_cpu:
            images, labels = images.pin_memory(), labels.pin_memory()

        def candidate(model: nn.Module, threads: int | None = None, stopwatch: Stopwatch | None = None) -> Candidate:
            watch = stopwatch or (lambda name: contextlib.nullcontext())
            if mode == "inference":
                call = _inference(model, images, self.devices[0], self.precision)
            else:
                call = _training(model, images, labels.to(self.devices[0]), self.precision, watch)
            return Candidate(call, self.devices, threads, stopwatch)

        def handwritten(stopwatch: Stopwatch | None) -> Candidate:
            model = HandwrittenDataParallel(self.build(), self.devices)
            if stopwatch is not None:
                model.step = stopwatch
            return candidate(model, stopwatch=stopwatch)

        stopwatch = Stopwatch(self.devices)
        found = {PLAIN: candidate(_OneDevice(self.build(), self.devices[0]))}
        if self.on_cpu:
            found[ONE_DEVICE] = candidate(_OneDevice(self.build(), self.devices[0]), threads=self.threads_of_one)
            if not torch.cuda.is_available():  # where there is a GPU, it wants the module there
                found[TORCH] = candidate(nn.DataParallel(self.build()))
            found[HANDWRITTEN] = handwritten(stopwatch)
        else:
            found[TORCH] = candidate(nn.DataParallel(self.build(), list(self.devices)))
            found[HANDWRITTEN] = handwritten(None)
            found[STEP_BY_STEP] = handwritten(stopwatch)  # it waits for the GPUs between the steps
        found[PROCESSES] = self._of_processes(processes, mode, images, labels)
        return found

    def _of_processes(self, processes: Processes, mode: str, images: Tensor, labels: Tensor) -> Candidate:
        stopwatch = Stopwatch(self.devices)

        def call() -> None:
            seconds = processes.infer(images)[1] if mode == "inference" else processes.train(images, labels)
            stopwatch.seconds["forward"] += seconds

        return Candidate(call, self.devices, stopwatch=stopwatch)


class Candidate:
    """A call, and how often it is made for one timing. Called, it gives the seconds of one.

    :param threads: intra-op threads of the calling thread, if others than it has
    :param stopwatch: which the call uses; its readings are kept in ``steps``, seconds per call, one entry per timing
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
    """The plain module, with the batch's way to its device."""

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
    """One optimizer step; labels are on the first device, where the loss is computed."""
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
