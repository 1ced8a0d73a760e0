"""The settings of ``dataparallel.bench``, and the models and batches that they give."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from common.cli import option
from common.errors import UsageError
from common.training.models import LEAST_SAMPLES, MODELS, build_model
from common.training.precision import PRECISIONS
from dataparallel.devices import parse_devices
from dataparallel.threads import share_of_threads

CLASSES = 10
SHAPES = {"fashion-cnn": (1, 28, 28), "mlp": (1, 28, 28), "resnet18": (3, 64, 64), "resnet50": (3, 224, 224)}
MODES = ("inference", "training")


@dataclass(frozen=True)
class DataParallelBenchConfig:
    """Settings of ``dataparallel.bench``.

    :raises UsageError: for devices that do not exist, or batches too small for all devices
    """

    model: str = option("fashion-cnn", "the model that is run", choices=MODELS)
    devices: str = option(
        "auto", "as cuda:0,cuda:1 or cpu,cpu; auto takes all GPUs if there are several, else the CPU several times"
    )
    batch_sizes: tuple[int, ...] = option((8, 32, 128, 512), "samples per call, over all devices", minimum=1)
    precision: str = option("fp32", "as in ddp.train", choices=PRECISIONS)
    rounds: int = option(7, "measured rounds; in each, every variant takes one turn", minimum=2)
    output: Path = option(Path("runs/bench-dataparallel"), "folder of the JSON and the figures")

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_sizes", tuple(sorted(self.batch_sizes)))
        devices = self.parsed_devices
        if len(devices) == 1:
            raise UsageError(f"--devices {self.devices} is a single device: name several, as cpu,cpu")
        if min(self.batch_sizes) < len(devices):
            raise UsageError(
                f"--batch-sizes {min(self.batch_sizes)} has no sample for each of {len(devices)} devices: "
                f"give at least {len(devices)}, or fewer --devices"
            )
        least = LEAST_SAMPLES.get(self.model, 1) * len(devices)
        if min(self.batch_sizes) < least:
            raise UsageError(
                f"--batch-sizes {min(self.batch_sizes)}: {self.model} is trained with several samples per device, as "
                f"BatchNorm needs: give at least {least}"
            )

    @property
    def parsed_devices(self) -> tuple[torch.device, ...]:
        """GPUs, or the CPU several times."""
        return parse_devices(self.devices)

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are the CPU."""
        return self.parsed_devices[0].type == "cpu"

    @property
    def threads_of_one(self) -> int:
        """Intra-op threads of one CPU device, or of one process."""
        return share_of_threads(len(self.parsed_devices))

    def build(self, device: torch.device) -> nn.Module:
        """Build the model on a device, with the same weights each time."""
        torch.manual_seed(0)
        return build_model(self.model, SHAPES[self.model], CLASSES).to(device)

    def images(self, samples: int) -> Tensor:
        """A random batch in the CPU's memory, float32 ``[samples, channels, height, width]``; pinned for GPUs."""
        images = torch.randn(samples, *SHAPES[self.model])
        return images if self.on_cpu else images.pin_memory()
