"""The DDP variants and the models that ``ddp.bench engines`` compares."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.benchmarking.turns import Step
from common.distributed.dist_env import DistEnv
from common.models.build import MODELS, build_model
from common.training.optimization import build_optimizer
from ddp.all_reduce import shared_memory_hook
from ddp.all_reduce.choice import build_all_reduce
from ddp.bench.comparison import training_step
from ddp.by_hand.naive import NaiveDistributedDataParallel
from ddp.by_hand.reducer import Reducer
from ddp.strategies import register_hook

IMAGE, CLASSES = (1, 28, 28), 10
DEEP, DEEP_BLOCKS, DEEP_WIDTH = "deep-mlp", 100, 20
NETWORKS = (*MODELS, DEEP)
LARGE = {"resnet50": (3, 224, 224)}  # channels, height and width of its images; for GPUs
ON_THE_CPU = tuple(name for name in NETWORKS if name not in LARGE)
SAMPLES = dict.fromkeys(NETWORKS, 72) | {"resnet18": 16, "resnet50": 32}  # of a rank in a step
AT_THE_END = "all-reduce at the end"
NO_SUM = "no sum"


def build_network(name: str) -> nn.Module:
    """Build a model of :data:`NETWORKS`, for images of its own shape or of :data:`IMAGE`, with the same weights on every rank."""
    torch.manual_seed(0)
    if name != DEEP:
        return build_model(name, LARGE.get(name, IMAGE), CLASSES)
    blocks: list[nn.Module] = []
    for _ in range(DEEP_BLOCKS):
        blocks += [nn.Linear(DEEP_WIDTH, DEEP_WIDTH), nn.LayerNorm(DEEP_WIDTH), nn.ReLU()]
    first, last = nn.Linear(IMAGE[1] * IMAGE[2], DEEP_WIDTH), nn.Linear(DEEP_WIDTH, CLASSES)
    return nn.Sequential(nn.Flatten(), first, *blocks, last)


@dataclass(frozen=True)
class DDPVariant:
    """A DDP wrapper with its options.

    :param wrapper: ``"torch"`` for torch's DDP, ``"handwritten"``, ``"naive"``, or ``"none"`` for no synchronization
    :param views: whether gradients are views into the buckets
    :param hook: a communication hook of :data:`HOOKS`
    :param all_reduce: of :data:`ddp.all_reduce.ALL_REDUCES`; for the hand-written wrapper
    :param copies: whether gradients are copied into the buckets; if not, what is sent is of no use
    """

    wrapper: str
    views: bool = True
    hook: str | None = None
    all_reduce: str = "backend"
    copies: bool = True

    def wrap(self, network: nn.Module) -> Any:
        """Wrap a network. A collective: every rank calls it with the same model."""
        model: Any = network
        if self.wrapper == "torch":
            model = DistributedDataParallel(network, gradient_as_bucket_view=self.views)
            model.broadcast_buffers = False  # the constructor's argument has another name since torch 2.15
        elif self.wrapper == "naive":
            model = NaiveDistributedDataParallel(network)
        elif self.wrapper == "handwritten":
            # Not at the top: torch.compiler.disable loads torch._dynamo, which takes a second.
            from ddp.by_hand.wrapper import HandwrittenDistributedDataParallel

            with contextlib.nullcontext() if self.copies else _without_copies():
                model = HandwrittenDistributedDataParallel(
                    network,
                    gradient_as_bucket_view=self.views,
                    broadcast_buffers=False,
                    all_reduce=build_all_reduce(self.all_reduce),
                )
        if self.hook:
            register_hook(model, *HOOKS[self.hook]())
        return model

    def step(self, model: str, env: DistEnv) -> Step:
        """The step of a model of :data:`NETWORKS` in this wrapper, on one batch that is in memory. A collective.

        The learning rate is 0: constant weights make every step the same work.
        """
        generator = torch.Generator().manual_seed(env.rank)
        images = torch.randn(SAMPLES[model], *LARGE.get(model, IMAGE), generator=generator).to(env.device)
        labels = torch.randint(CLASSES, (SAMPLES[model],), generator=generator).to(env.device)
        wrapped = self.wrap(build_network(model).to(env.device))
        optimizer = build_optimizer("sgd", wrapped.parameters(), momentum=0.9, weight_decay=5e-4)
        return training_step(wrapped, optimizer, images, labels)


def _without_copies() -> contextlib.AbstractContextManager[object]:
    """A block in which a hand-written wrapper is built whose buckets stay as they are."""

    class HooksAlone(Reducer):
        def _build_buckets(self, order: Iterable[int]) -> None:
            super()._build_buckets(order)
            nothing: Any = lambda *_: None  # noqa: E731
            for bucket in self.buckets:
                bucket.copy_in = bucket.fill = bucket.set_grads = nothing  # type: ignore[method-assign]

    return mock.patch("ddp.by_hand.wrapper.Reducer", HooksAlone)


PLAIN, VIEWS, FLOOR = "torch DDP", "torch DDP, views", "no synchronization"
NAIVE, BUCKETED = "naive", "bucketed, no overlap"
HOOKED = "torch DDP, shared memory"
BY_HAND, SHARED = "handwritten", "handwritten, shared memory"
DDP_VARIANTS: Mapping[str, DDPVariant] = {
    PLAIN: DDPVariant("torch", views=False),
    VIEWS: DDPVariant("torch"),
    HOOKED: DDPVariant("torch", hook=HOOKED),
    NAIVE: DDPVariant("naive"),
    BUCKETED: DDPVariant("handwritten", hook=AT_THE_END),
    BY_HAND: DDPVariant("handwritten"),
    "handwritten, copies": DDPVariant("handwritten", views=False),
    SHARED: DDPVariant("handwritten", all_reduce="shared-memory"),
    FLOOR: DDPVariant("none"),
}
# From the simplest DDP to the real one: an all-reduce per parameter after backward, one per bucket, and overlap with backward.
CLIMB = {NAIVE: "naive", BUCKETED: "bucketed", BY_HAND: "overlapped"}


def _no_sum(_: object, bucket: Any) -> torch.futures.Future[Tensor]:
    """A communication hook that sums nothing."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class _AtTheEnd:
    """A communication hook without overlap: it holds every bucket until the last is complete, then sums all of them."""

    def __init__(self) -> None:
        self._held: list[tuple[Tensor, torch.futures.Future[Tensor]]] = []

    def __call__(self, _: object, bucket: Any) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        devices = [buffer.device] if buffer.is_cuda else None  # on whose streams its waiters wait
        future_average: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        self._held.append((buffer.div_(dist.get_world_size()), future_average))
        if bucket.is_last():  # all gradients are computed, so nothing overlaps with this wait
            works = [dist.all_reduce(buffer, async_op=True) for buffer, _ in self._held]
            for work, (buffer, future) in zip(works, self._held, strict=True):
                assert work is not None
                work.wait()
                future.set_result(buffer)
            self._held.clear()
        return future_average


# Each entry makes the arguments of register_comm_hook, with a state of its own for each model.
HOOKS: Mapping[str, Callable[[], tuple[Any, Callable[..., Any]]]] = {
    NO_SUM: lambda: (None, _no_sum),
    AT_THE_END: lambda: (None, _AtTheEnd()),
    HOOKED: shared_memory_hook,
}
