"""What ``ddp.bench engines`` compares: ways to average gradients, what they can be told, and the models to try them on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from common.training.models import MODELS, build_model
from ddp.all_reduce.choice import ALL_REDUCES, build_all_reduce
from ddp.by_hand.wrapper import HandwrittenDistributedDataParallel

IMAGE, CLASSES = (1, 28, 28), 10
DEEP, DEEP_BLOCKS, DEEP_WIDTH = "deep-mlp", 100, 20
NETWORKS = (*MODELS, DEEP)
ONE_BUCKET_MIB = 10**6  # holds any model's gradients


def build_network(name: str) -> nn.Module:
    """The model ``name`` of :data:`NETWORKS` for images of 28x28, with the same weights on every rank."""
    torch.manual_seed(0)
    if name != DEEP:
        return build_model(name, IMAGE, CLASSES)
    blocks: list[nn.Module] = []
    for _ in range(DEEP_BLOCKS):
        blocks += [nn.Linear(DEEP_WIDTH, DEEP_WIDTH), nn.LayerNorm(DEEP_WIDTH), nn.ReLU()]
    first, last = nn.Linear(IMAGE[1] * IMAGE[2], DEEP_WIDTH), nn.Linear(DEEP_WIDTH, CLASSES)
    return nn.Sequential(nn.Flatten(), first, *blocks, last)


@dataclass(frozen=True)
class Engine:
    """A way to train.

    :param wrapper: ``"torch"`` for torch's DDP, ``"handwritten"``, or ``"none"``, which leaves each rank its own gradients
    :param views: whether gradients are views into the buckets; :param bucket_mib: the wrapper's default when None
    :param hook: of :data:`HOOKS`; :param all_reduce: of :data:`ddp.all_reduce.choice.ALL_REDUCES`, for the hand-written one
    """

    wrapper: str
    views: bool = True
    bucket_mib: int | None = None
    hook: str | None = None
    all_reduce: str = "backend"

    def wrap(self, network: nn.Module) -> tuple[nn.Module, Callable[[], None]]:
        """The network with the engine around it, a collective; and what to call at the end."""
        model: Any = network
        close: Callable[[], None] = _nothing
        if self.wrapper == "torch":
            model = DistributedDataParallel(network, gradient_as_bucket_view=self.views, bucket_cap_mb=self.bucket_mib)
            model.broadcast_buffers = False  # the constructor's argument has another name since torch 2.15
        elif self.wrapper == "handwritten":
            all_reduce = build_all_reduce(self.all_reduce)
            close = all_reduce.close
            model = HandwrittenDistributedDataParallel(
                network,
                gradient_as_bucket_view=self.views,
                bucket_cap_mb=self.bucket_mib,
                broadcast_buffers=False,
                all_reduce=all_reduce,
            )
        if self.hook:
            state, hook = HOOKS[self.hook]()
            # By way of a lambda: torch refuses bf16_compress_hook by its name where there is no NCCL, but gloo sums bf16 too.
            model.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
        return model, close


def _nothing() -> None:
    pass


PLAIN, VIEWS, FLOOR = "torch DDP", "torch DDP, views", "no synchronization"
BY_HAND, SHARED = "handwritten", "handwritten, shared memory"
ENGINES: Mapping[str, Engine] = {
    PLAIN: Engine("torch", views=False),
    VIEWS: Engine("torch"),
    BY_HAND: Engine("handwritten"),
    "handwritten, copies": Engine("handwritten", views=False),
    SHARED: Engine("handwritten", all_reduce="shared-memory"),
    FLOOR: Engine("none"),
}


def variations() -> dict[str, dict[str, Engine]]:
    """What the engines can be told, by subject; the first of each is torch's DDP that is told nothing."""
    found: dict[str, dict[str, Engine]] = {
        subject: {VIEWS: ENGINES[VIEWS]} for subject in ("bucket size", "overlap", "hooks", "all-reduce")
    }
    for name, wrapper in (("torch DDP", "torch"), ("handwritten", "handwritten")):
        for mib in (1, 5, 25, 100):
            found["bucket size"][f"{name}, {mib} MiB"] = Engine(wrapper, bucket_mib=mib)
        found["overlap"][f"{name}, overlap"] = Engine(wrapper, hook="all-reduce")
        found["overlap"][f"{name}, no overlap"] = Engine(wrapper, hook="all-reduce at the end")
        found["hooks"][f"{name}, bf16"] = Engine(wrapper, hook="bf16")
        found["hooks"][f"{name}, PowerSGD"] = Engine(wrapper, hook="PowerSGD", bucket_mib=ONE_BUCKET_MIB)
    for all_reduce in ALL_REDUCES:
        if all_reduce != "hierarchical":  # on one host that is shared memory
            found["all-reduce"][f"handwritten, {all_reduce}"] = Engine("handwritten", all_reduce=all_reduce)
    return found


class _AtTheEnd:
    """A communication hook that keeps every bucket until the last is complete, and then sums them all."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, torch.futures.Future[Tensor]]] = []

    def __call__(self, _: object, bucket: Any) -> torch.futures.Future[Tensor]:
        promised: torch.futures.Future[Tensor] = torch.futures.Future()
        self._kept.append((bucket.buffer().div_(dist.get_world_size()), promised))
        if bucket.is_last():  # backward is over: to wait here is to wait at its end
            works = [dist.all_reduce(buffer, async_op=True) for buffer, _ in self._kept]
            for work, (buffer, future) in zip(works, self._kept, strict=True):
                assert work is not None
                work.wait()
                future.set_result(buffer)
            self._kept.clear()
        return promised


# For a model of its own, each makes what register_comm_hook takes.
HOOKS: Mapping[str, Callable[[], tuple[Any, Callable[..., Any]]]] = {
    "all-reduce": lambda: (None, allreduce_hook),
    "all-reduce at the end": lambda: (None, _AtTheEnd()),
    "bf16": lambda: (None, bf16_compress_hook),
    "PowerSGD": lambda: (PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2), powerSGD_hook),
}
