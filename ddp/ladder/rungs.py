"""The rungs of ``ddp.ladder``: one training loop, in which each rung changes one thing."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from common.benchmarking.turns import timed_steps
from common.data.datasets import ImageData
from common.distributed.dist_env import DistEnv
from common.machine import keep_freed_memory
from common.models.build import build_model
from common.training.precision import autocast
from ddp.bench.variants import DDPVariant

RANKS, BATCH_SIZE = 2, 144  # the batch is that of all ranks
LEARNING_RATE = 1e-3  # Adam's default


@dataclasses.dataclass(frozen=True)
class Rung:
    """A training loop.

    :param batches: makes a rank's batches
    :param fused: whether Adam updates all parameters in one kernel, and images and weights lie as NHWC
    :param ranks: processes, which share the cores
    :param keeps_memory: whether malloc keeps freed memory
    :param all_reduce: of the DDP by hand; None takes torch's DDP
    :param precision: one of :data:`common.training.precision.PRECISIONS`
    """

    batches: Callable[[ImageData, int], MakeEpoch]
    fused: bool = False
    ranks: int = 1
    keeps_memory: bool = False
    all_reduce: str | None = None
    precision: str = "fp32"


class OneByOne(Dataset[tuple[Tensor, int]]):
    """Training samples as torchvision's FashionMNIST returns them: a PIL image, transformed (torchvision/datasets/mnist.py).

    :param data: in memory
    """

    def __init__(self, data: ImageData) -> None:
        from PIL.Image import fromarray
        from torchvision.transforms import Compose, Normalize, ToTensor

        train: Any = data.train
        self._images, self._labels = train.images, train.labels.tolist()
        self._transform = Compose([fromarray, ToTensor(), Normalize((data.mean,), (data.std,))])

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._transform(self._images[index, 0]), self._labels[index]


# The batches of an epoch, of the samples in their order.
MakeEpoch = Callable[[Tensor], Iterable[Any]]


def one_by_one(data: ImageData, size: int) -> MakeEpoch:
    """``DataLoader`` asks for each sample, and stacks them."""
    samples = OneByOne(data)
    return lambda order: DataLoader(samples, size, sampler=order.tolist())


def whole(data: ImageData, size: int, as_bytes: bool = False) -> MakeEpoch:
    """A batch is one indexing operation. Images are normalized before, or stay uint8 until then: a quarter of the bytes."""
    train: Any = data.train
    images, labels = torch.from_numpy(train.images), torch.from_numpy(train.labels)
    if as_bytes:
        return lambda order: ((data.to_input(images[part]), labels[part]) for part in order.split(size))
    images = data.to_input(images)
    return lambda order: ((images[part], labels[part]) for part in order.split(size))


FIRST = "the usual first script"
CHANGES: Mapping[str, Mapping[str, Any]] = {
    FIRST: {},
    "batches fetched whole": {"batches": whole},
    "memory kept": {"keeps_memory": True},
    "uint8 in memory": {"batches": functools.partial(whole, as_bytes=True)},
    "Adam fused, channels last": {"fused": True},
    "two ranks, torch's DDP": {"ranks": RANKS},
    "gradients in shared memory": {"all_reduce": "shared-memory"},
    "bf16": {"precision": "bf16"},
}


def rungs() -> dict[str, Rung]:
    """Each is the one before with one change."""
    rung, climbed = Rung(one_by_one), {}
    for name, change in CHANGES.items():
        rung = climbed[name] = dataclasses.replace(rung, **change)
    return climbed


class Turn(NamedTuple):
    """Some steps of a rank.

    :param seconds: of a step
    :param loading: share of them until a batch was there
    :param kernel: share of the cores' time that the kernel took: to hand out memory, and to move bytes between processes
    :param idle: share of it in which a core waited, for another rank or for a part that is not divided over threads
    """

    seconds: float
    loading: float
    kernel: float
    idle: float


class Training:
    """The service of one rank: a training that goes on from call to call. A subclass has ``_step`` and ``_network``, and may put seconds
    that each call takes before its first step into ``_setup``: they do not count."""

    _network: nn.Module
    _step: Callable[[], object]

    def __init__(self, env: DistEnv, data: ImageData) -> None:
        self._env, self._data = env, data
        self._loading = self._setup = 0.0

    def _timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, whose loading is timed."""
        loaded = iter(batches)
        while True:
            asked = time.perf_counter()
            batch = next(loaded, None)
            self._loading += time.perf_counter() - asked
            if batch is None:
                return
            yield batch

    def run(self, steps: int) -> Turn:
        """Train."""
        self._network.train()
        self._loading, kernel_before = 0.0, os.times().system
        seconds, processor = timed_steps(functools.partial(self._take, steps), 1)
        seconds -= self._setup
        cores = seconds * torch.get_num_threads()
        kernel = os.times().system - kernel_before
        return Turn(seconds / steps, self._loading / seconds, kernel / cores, max(0.0, 1 - processor / cores))

    def _take(self, steps: int) -> None:
        for _ in range(steps):
            self._step()


class RungTraining(Training):
    """The training loop of a rung.

    :param data: in memory
    """

    def __init__(self, env: DistEnv, rung: Rung, data: ImageData) -> None:
        super().__init__(env, data)
        if rung.keeps_memory:
            keep_freed_memory()
        torch.manual_seed(0)
        memory_format = torch.channels_last if rung.fused else torch.contiguous_format
        network = self._network = build_model("fashion-cnn", data.shape, len(data.classes))
        network.to(memory_format=memory_format)
        wrapper = "none" if rung.ranks == 1 else "handwritten" if rung.all_reduce else "torch"
        model = DDPVariant(wrapper, all_reduce=rung.all_reduce or "backend").wrap(network)
        optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE, fused=rung.fused or None)
        batches = self._timed(self._endless(rung.batches(data, BATCH_SIZE // env.world_size)))

        def step() -> None:
            images, labels = next(batches)
            with autocast(env.device, rung.precision):
                loss = F.cross_entropy(model(images).float(), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        self._step = step

    def _endless(self, epoch: MakeEpoch) -> Iterator[tuple[Tensor, Tensor]]:
        generator, samples = torch.Generator(), len(self._data.train)
        while True:
            order = torch.randperm(samples, generator=generator)  # the same on every rank
            yield from epoch(order[: samples // BATCH_SIZE * BATCH_SIZE][self._env.rank :: self._env.world_size])
