"""One process per device, as far as a benchmark needs it: what ``DistributedDataParallel`` does instead of four steps.

Each process keeps its replica, so nothing is replicated: in training all take the same step, since DDP gives all the same
gradients. Each has an interpreter of its own, so there is no GIL between them. A batch lies in shared memory, from where each
takes its part; in a real job each would load its own.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from common.distributed.process_group import DistEnv
from common.distributed.worker_group import WorkerGroup
from common.training.models import build_model
from common.training.precision import autocast


class Processes:
    """Ranks that stay, and the memory that they share with this process; a context manager that ends them.

    :param shape: of one image; :param largest: samples in the largest batch
    :param devices: GPUs, or the CPU several times; :param threads: intra-op threads of each process
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
            len(devices), Replica, *arguments, device=devices[0].type, threads=threads, name="replica"
        )

    def infer(self, images: Tensor) -> tuple[Tensor, float]:
        """:param images: float ``[n, channels, height, width]`` on the CPU

        :returns: logits ``[n, classes]`` on the CPU, valid until the next call; the slowest replica's seconds of computing
        """
        self.images[: len(images)].copy_(images)
        seconds = self._ranks.call("infer", len(images))
        return self.logits[: len(images)], max(seconds)

    def train(self, images: Tensor, labels: Tensor) -> float:
        """One optimizer step.

        :param labels: int64 ``[n]``
        :returns: the slowest replica's seconds in its forward pass (on a GPU, of queueing it)
        """
        self.images[: len(images)].copy_(images)
        self.labels[: len(labels)].copy_(labels)
        seconds: list[float] = self._ranks.call("train", len(images))
        return max(seconds)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._ranks.__exit__(*exception)


class Replica:
    """A rank's service: the model on this rank's device, and its part of each batch."""

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
        self._network = build_model(model, shape, classes).to(env.device)
        self._model = DistributedDataParallel(
            self._network,
            device_ids=[env.device] if env.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
        # BatchNorm's statistics of rank 0 need not be sent before each forward pass. (Set here, because the constructor's
        # argument has another name since torch 2.15.)
        self._model.broadcast_buffers = False
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=0.01, momentum=0.9, fused=True)
        self._precision = precision
        self._scaler = torch.amp.GradScaler(env.device.type, enabled=precision == "fp16")

    def infer(self, samples: int) -> float:
        """Put this rank's logits where they belong; the seconds of computing them."""
        part = self._part(samples)
        self._network.eval()
        began = time.perf_counter()
        with torch.inference_mode(), autocast(self._env.device, self._precision):
            logits = self._network(self._images[part].to(self._env.device, non_blocking=True))
        self._logits[part].copy_(logits)  # waits for the GPU
        return time.perf_counter() - began

    def train(self, samples: int) -> float:
        """One step; the seconds of its forward pass."""
        part = self._part(samples)
        images, labels = (all_of[part].to(self._env.device) for all_of in (self._images, self._labels))
        self._network.train()
        began = time.perf_counter()
        with autocast(self._env.device, self._precision):
            logits = self._model(images)
        seconds = time.perf_counter() - began
        # DDP averages over ranks; parts may differ by a sample, so each counts with its share of the batch.
        loss = F.cross_entropy(logits.float(), labels, reduction="sum") * self._env.world_size / samples
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        if self._env.device.type == "cuda":
            torch.cuda.synchronize(self._env.device)
        return seconds

    def _part(self, samples: int) -> slice:
        """This rank's samples of a batch."""
        rank, ranks = self._env.rank, self._env.world_size
        return slice(rank * samples // ranks, (rank + 1) * samples // ranks)
