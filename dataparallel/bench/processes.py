"""One process per device, for comparison: ``DistributedDataParallel`` instead of the four steps.

Each process keeps its replica, so no call replicates the model. In training all replicas take the same optimizer step, since
DDP gives them the same gradients. Each process has its own interpreter and its own GIL. A batch lies in shared memory, and each
process takes its part of it; in a real job each process would load its own part.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from common.data.pinned import pin_shared
from common.distributed.process_group import DistEnv
from common.distributed.worker_group import WorkerGroup
from common.training.models import build_model
from common.training.precision import autocast


class ReplicaProcesses:
    """A group of ranks, and the memory that they share with this process; a context manager that ends them.

    :param model: of :data:`common.training.models.MODELS`
    :param shape: ``(channels, height, width)`` of one image
    :param classes: number of classes
    :param largest: samples in the largest batch
    :param devices: GPUs, or the CPU several times
    :param precision: of :data:`common.training.precision.PRECISIONS`
    :param threads: intra-op threads of each process
    """

    def __init__(
        self,
        model: str,
        shape: tuple[int, int, int],
        classes: int,
        largest: int,
        devices: tuple[torch.device, ...],
        precision: str,
        threads: int,
    ) -> None:
        self.images = torch.empty(largest, *shape).share_memory_()
        self.labels = torch.empty(largest, dtype=torch.int64).share_memory_()
        self.logits = torch.empty(largest, classes).share_memory_()
        arguments = model, shape, classes, precision, self.images, self.labels, self.logits
        self._ranks = WorkerGroup(
            len(devices), ReplicaWorker, *arguments, device=devices[0].type, threads=threads, name="replica"
        )

    def infer(self, images: Tensor) -> tuple[Tensor, float]:
        """Classify one batch.

        :param images: float32 ``[n, channels, height, width]`` on the CPU
        :returns: logits ``[n, classes]`` on the CPU, valid until the next call, and the compute seconds of the slowest replica
        """
        self.images[: len(images)].copy_(images)
        seconds = self._ranks.call("infer", len(images))
        return self.logits[: len(images)], max(seconds)

    def train(self, images: Tensor, labels: Tensor) -> float:
        """Take one optimizer step.

        :param images: float32 ``[n, channels, height, width]`` on the CPU
        :param labels: int64 ``[n]`` on the CPU
        :returns: the slowest replica's seconds in its forward pass (on a GPU, of queueing it)
        """
        self.images[: len(images)].copy_(images)
        self.labels[: len(labels)].copy_(labels)
        seconds: list[float] = self._ranks.call("train", len(images))
        return max(seconds)

    def __enter__(self) -> ReplicaProcesses:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._ranks.__exit__(*exception)


class ReplicaWorker:
    """The service of one rank: the model on this rank's device, and its part of each batch."""

    def __init__(
        self,
        env: DistEnv,
        model: str,
        shape: tuple[int, int, int],
        classes: int,
        precision: str,
        images: Tensor,
        labels: Tensor,
        logits: Tensor,
    ) -> None:
        torch.manual_seed(0)
        self._env, self._images, self._labels, self._logits = env, images, labels, logits
        if env.device.type == "cuda":
            for shared in (images, labels):
                pin_shared(shared, env.device, "use smaller --batch-sizes")
        self._network = build_model(model, shape, classes).to(env.device)
        self._model = DistributedDataParallel(
            self._network,
            device_ids=[env.device] if env.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
        # Skips the broadcast of BatchNorm's statistics before each forward pass. (Set here, because the constructor's
        # argument has another name since torch 2.15.)
        self._model.broadcast_buffers = False
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=0.01, momentum=0.9, fused=True)
        self._precision = precision
        self._scaler = torch.amp.GradScaler(env.device.type, enabled=precision == "fp16")

    def infer(self, samples: int) -> float:
        """Write this rank's logits to shared memory, and return the seconds of their computation."""
        part = self._part(samples)
        self._network.eval()
        began = time.perf_counter()
        with torch.inference_mode(), autocast(self._env.device, self._precision):
            logits = self._network(self._images[part].to(self._env.device, non_blocking=True))
        self._logits[part].copy_(logits)  # waits for the GPU
        return time.perf_counter() - began

    def train(self, samples: int) -> float:
        """Take one optimizer step, and return the seconds of its forward pass."""
        part = self._part(samples)
        images, labels = (
            all_of[part].to(self._env.device, non_blocking=True) for all_of in (self._images, self._labels)
        )
        self._network.train()
        began = time.perf_counter()
        with autocast(self._env.device, self._precision):
            logits = self._model(images)
        seconds = time.perf_counter() - began
        # DDP averages over ranks. Parts may differ by one sample, so each loss is weighted by its share of the batch.
        loss = F.cross_entropy(logits.float(), labels, reduction="sum") * self._env.world_size / samples
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        if self._env.device.type == "cuda":
            torch.cuda.synchronize(self._env.device)
        return seconds

    def _part(self, samples: int) -> slice:
        """The slice of a batch that belongs to this rank."""
        rank, ranks = self._env.rank, self._env.world_size
        return slice(rank * samples // ranks, (rank + 1) * samples // ranks)
