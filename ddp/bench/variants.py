"""The DDP variants and the models that ``ddp.bench engines`` compares, and what a rank does with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from common.distributed.process_group import DistEnv
from common.training.models import MODELS, build_model
from common.training.optimization import build_optimizer
from ddp.all_reduce import ALL_REDUCES
from ddp.all_reduce.choice import build_all_reduce
from ddp.bench.turns import keep_freed_memory, timed_steps
from ddp.compression import register_hook

IMAGE, CLASSES = (1, 28, 28), 10
DEEP, DEEP_BLOCKS, DEEP_WIDTH = "deep-mlp", 100, 20
NETWORKS = (*MODELS, DEEP)
LARGE = {"resnet50": (3, 224, 224)}  # its images; for GPUs
ON_THE_CPU = tuple(name for name in NETWORKS if name not in LARGE)
SAMPLES = dict.fromkeys(NETWORKS, 72) | {"resnet18": 16, "resnet50": 32}  # of a rank in a step
ONE_BUCKET_MIB = 10**6  # a bucket that holds all gradients of any model
AT_THE_END = "all-reduce at the end"
NO_SUM = "no sum"


def image_shape(name: str) -> tuple[int, int, int]:
    """Channels, height and width of a model's images."""
    return LARGE.get(name, IMAGE)


def build_network(name: str) -> nn.Module:
    """Build a model of :data:`NETWORKS` for images of :func:`image_shape`, with the same weights on every rank."""
    torch.manual_seed(0)
    if name != DEEP:
        return build_model(name, image_shape(name), CLASSES)
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
    :param bucket_mib: size limit of a bucket in MiB; None for the wrapper's default
    :param hook: a communication hook of :data:`HOOKS`
    :param all_reduce: of :data:`ddp.all_reduce.ALL_REDUCES`; for the hand-written wrapper
    :param copies: whether gradients are copied into the buckets; if not, what is sent is of no use
    """

    wrapper: str
    views: bool = True
    bucket_mib: int | None = None
    hook: str | None = None
    all_reduce: str = "backend"
    copies: bool = True

    def wrap(self, network: nn.Module) -> tuple[nn.Module, Callable[[], None]]:
        """Wrap a network. A collective: every rank calls it with the same model.

        :returns: the wrapped network, and a function that releases its all-reduce
        """
        # Imported here: both bring torch._dynamo along, and ``--help`` needs neither.
        from torch.nn.parallel import DistributedDataParallel

        from ddp.by_hand.naive import NaiveDistributedDataParallel
        from ddp.by_hand.wrapper import HandwrittenDistributedDataParallel

        model: Any = network
        close: Callable[[], None] = _nothing
        if self.wrapper == "torch":
            model = DistributedDataParallel(network, gradient_as_bucket_view=self.views, bucket_cap_mb=self.bucket_mib)
            model.broadcast_buffers = False  # the constructor's argument has another name since torch 2.15
        elif self.wrapper == "naive":
            model = NaiveDistributedDataParallel(network)
        elif self.wrapper == "handwritten":
            all_reduce = build_all_reduce(self.all_reduce)
            close = all_reduce.close
            model = (HandwrittenDistributedDataParallel if self.copies else _without_copies())(
                network,
                gradient_as_bucket_view=self.views,
                bucket_cap_mb=self.bucket_mib,
                broadcast_buffers=False,
                all_reduce=all_reduce,
            )
        if self.hook:
            register_hook(model, *HOOKS[self.hook]())
        return model, close


def _nothing(*_: Any) -> None:
    pass


def _without_copies() -> type[Any]:
    """The hand-written wrapper, whose buckets stay as they are."""
    from ddp.by_hand.reducer import Reducer
    from ddp.by_hand.wrapper import HandwrittenDistributedDataParallel

    class HooksAlone(Reducer):
        def _build_buckets(self, order: Iterable[int]) -> None:
            super()._build_buckets(order)
            for bucket in self.buckets:
                for copies in ("copy_in", "fill", "finalize"):
                    setattr(bucket, copies, _nothing)

    class WithoutCopies(HandwrittenDistributedDataParallel):
        reducer_type = HooksAlone

    return WithoutCopies


PLAIN, VIEWS, FLOOR = "torch DDP", "torch DDP, views", "no synchronization"
NAIVE, BUCKETED = "naive", "bucketed, no overlap"
BY_HAND, SHARED = "handwritten", "handwritten, shared memory"
DDP_VARIANTS: Mapping[str, DDPVariant] = {
    PLAIN: DDPVariant("torch", views=False),
    VIEWS: DDPVariant("torch"),
    NAIVE: DDPVariant("naive"),
    BUCKETED: DDPVariant("handwritten", hook=AT_THE_END),
    BY_HAND: DDPVariant("handwritten"),
    "handwritten, copies": DDPVariant("handwritten", views=False),
    SHARED: DDPVariant("handwritten", all_reduce="shared-memory"),
    FLOOR: DDPVariant("none"),
}


@dataclass(frozen=True)
class Rung:
    """One step of the climb from the simplest DDP to the real one.

    :param variant: its name in :data:`DDP_VARIANTS`
    :param adds: the change from the rung before
    """

    name: str
    variant: str
    adds: str


CLIMB = (
    Rung("naive", NAIVE, "one all-reduce per parameter, after backward"),
    Rung("bucketed", BUCKETED, "one all-reduce per bucket, after backward"),
    Rung("overlapped", BY_HAND, "each bucket's all-reduce overlaps backward"),
)


def variants_on(device: str, variants: Mapping[str, DDPVariant]) -> dict[str, DDPVariant]:
    """Those that can run there: on a GPU only the backend can sum.

    :param device: ``"cpu"`` or ``"cuda"``
    """
    return {name: one for name, one in variants.items() if device == "cpu" or one.all_reduce == "backend"}


def variations() -> dict[str, dict[str, DDPVariant]]:
    """For each option of the wrappers, the variants that differ in it; the first is torch's DDP with its defaults."""
    found: dict[str, dict[str, DDPVariant]] = {
        subject: {VIEWS: DDP_VARIANTS[VIEWS]} for subject in ("bucket size", "overlap", "hooks", "all-reduce")
    }
    for name, wrapper in (("torch DDP", "torch"), ("handwritten", "handwritten")):
        for mib in (1, 5, 25, 100):
            found["bucket size"][f"{name}, {mib} MiB"] = DDPVariant(wrapper, bucket_mib=mib)
        found["overlap"][f"{name}, overlap"] = DDPVariant(wrapper, hook="all-reduce")
        found["overlap"][f"{name}, no overlap"] = DDPVariant(wrapper, hook=AT_THE_END)
        found["hooks"][f"{name}, bf16"] = DDPVariant(wrapper, hook="bf16")
        found["hooks"][f"{name}, PowerSGD"] = DDPVariant(wrapper, hook="PowerSGD", bucket_mib=ONE_BUCKET_MIB)
    for all_reduce in ALL_REDUCES:
        if all_reduce != "hierarchical":  # on one host, hierarchical is shared memory
            found["all-reduce"][f"handwritten, {all_reduce}"] = DDPVariant("handwritten", all_reduce=all_reduce)
    return found


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
    "all-reduce": lambda: (None, allreduce_hook),
    NO_SUM: lambda: (None, _no_sum),
    AT_THE_END: lambda: (None, _AtTheEnd()),
    "bf16": lambda: (None, bf16_compress_hook),
    "PowerSGD": lambda: (PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2), powerSGD_hook),
}


class DDPVariantWorker:
    """The service of one rank: for every variant a copy of the model with an optimizer, and one batch for all.

    The learning rate is 0: constant weights make every step the same work.
    """

    def __init__(self, env: DistEnv, model: str, variants: Mapping[str, DDPVariant], keep_memory: bool) -> None:
        if keep_memory:
            keep_freed_memory()
        generator = torch.Generator().manual_seed(env.rank)
        self._device = env.device
        self._images = torch.randn(SAMPLES[model], *image_shape(model), generator=generator).to(env.device)
        self._labels = torch.randint(CLASSES, (SAMPLES[model],), generator=generator).to(env.device)
        self._closing: list[Callable[[], None]] = []
        self._models: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
        for name, variant in variants.items():
            wrapped, close = variant.wrap(build_network(model).to(env.device))
            optimizer = build_optimizer("sgd", wrapped.parameters(), momentum=0.9, weight_decay=5e-4)
            self._models[name] = wrapped, optimizer
            self._closing.append(close)

    def run(self, name: str, steps: int) -> tuple[float, float]:
        """Train some steps. See :func:`timed_steps`."""
        model, optimizer = self._models[name]

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(self._images), self._labels).backward()
            optimizer.step()

        return timed_steps(step, steps, self._device)

    def close(self) -> None:
        self._models.clear()
        for close in self._closing:
            close()
