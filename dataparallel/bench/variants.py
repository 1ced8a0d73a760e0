"""The variants that the benchmark compares. Each runs one batch, which begins in the CPU's memory, through one model."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.benchmarking.turns import Step, calls_of_a_turn, timed_steps
from common.models.build import build_model
from dataparallel.bench.stopwatch import Stopwatch
from dataparallel.broadcast import StepContext
from dataparallel.parallel import HandwrittenDataParallel

PLAIN, TORCH, HANDWRITTEN = "plain module", "nn.DataParallel", "handwritten"
STEP_BY_STEP = "handwritten, step by step"  # on GPUs it waits after each step, and so is slower
MODES = ("inference", "training")
SHAPES = {"fashion-cnn": (1, 28, 28), "mlp": (1, 28, 28), "resnet18": (3, 64, 64), "resnet50": (3, 224, 224)}
CLASSES = 10
TURN_S = 0.06  # the least length of a turn; one of a small batch takes many calls


def build_variants(model: str, devices: tuple[torch.device, ...], mode: str, batch_size: int) -> dict[str, Variant]:
    """All variants for one of the modes and one batch size, with the same weights."""

    def network() -> nn.Module:
        torch.manual_seed(0)
        return build_model(model, SHAPES[model], CLASSES).to(devices[0])

    images = torch.randn(batch_size, *SHAPES[model])
    models: dict[str, nn.Module] = {PLAIN: OneDevice(network(), devices[0])}
    if devices[0].type == "cuda":
        images = images.pin_memory()
        models[TORCH] = nn.DataParallel(network(), list(devices))
    for name in (HANDWRITTEN, STEP_BY_STEP):
        models[name] = HandwrittenDataParallel(network(), devices)
    stopwatch = Stopwatch(devices)
    models[STEP_BY_STEP].step = stopwatch  # type: ignore[assignment]
    return {
        name: Variant(built, mode, images, devices[0], stopwatch if name == STEP_BY_STEP else None)
        for name, built in models.items()
    }


class OneDevice(nn.Module):
    """The plain module, with the transfer of the batch to its device."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.module, self._device = module, device

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.module(images.to(self._device, non_blocking=True))
        return logits


class Variant:
    """One turn of it, when called: the mean seconds of a batch, and of each step of that if the steps are timed.

    :param mode: of :data:`MODES`
    :param images: on the CPU; the model moves them
    :param device: the first, where the loss is computed
    :param stopwatch: sums the seconds of the steps
    """

    def __init__(
        self, model: nn.Module, mode: str, images: Tensor, device: torch.device, stopwatch: Stopwatch | None
    ) -> None:
        self._device, self._stopwatch = device, stopwatch
        self._step = step_of(model, mode, images, device, stopwatch or contextlib.nullcontext)
        self._run(1)  # the first call is slower than the rest
        self._calls = calls_of_a_turn(self._run, TURN_S)
        if stopwatch:
            stopwatch.take()

    def __call__(self) -> tuple[float, dict[str, float]]:
        seconds = self._run(self._calls)
        steps = self._stopwatch.take() if self._stopwatch else {}
        return seconds, {name: total / self._calls for name, total in steps.items()}

    def _run(self, calls: int) -> float:
        return timed_steps(self._step, calls, self._device)[0]


def step_of(model: nn.Module, mode: str, images: Tensor, device: torch.device, watch: StepContext) -> Step:
    """A function that classifies one batch, or takes one optimizer step on it.

    :param watch: around the steps that are not the model's
    """
    model.train(mode == "training")
    labels = torch.zeros(len(images), dtype=torch.int64, device=device)
    # Weights that learn one batch by heart have denormal gradients, and those take Intel's cores ten times as long.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, fused=True)

    def infer() -> None:
        with torch.inference_mode():
            model(images)

    def train() -> None:
        logits = model(images)
        with watch("loss"):
            loss = F.cross_entropy(logits, labels)
        with watch("backward"):
            loss.backward()
        with watch("optimizer"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return train if mode == "training" else infer
