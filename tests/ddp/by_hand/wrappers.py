"""A model of the zoo in torch's DDP or in the one under test, and the comparison of what each of them records."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from tests.support.zoo.named import MODELS, batch
from tests.support.zoo.random_models import POISON, SIDE, Model, Network

Results = dict[str, Tensor | None]


@dataclass(frozen=True)
class Case:
    """A model and how it is wrapped.

    :param model: of :data:`tests.support.zoo.named.MODELS`, or a random one
    :param bucket_cap_mb, as_view, find_unused, static_graph, broadcast_buffers: the wrapper's
    :param hook: of :data:`HOOKS`
    :param optimizer: of :data:`OPTIMIZERS`
    :param dtype: of the whole model, if not its own
    :param device: of the model and its inputs
    """

    model: str | Model
    bucket_cap_mb: float | None = None
    as_view: bool = True
    find_unused: bool = False
    static_graph: bool = False
    broadcast_buffers: bool = True
    hook: str | None = None
    optimizer: str = "momentum"
    dtype: torch.dtype | None = None
    device: str = "cpu"

    def network(self, seed: int) -> nn.Module:
        """The model, with weights of their own for each seed."""
        if isinstance(self.model, Model):
            return Network(replace(self.model, seed=self.model.seed + seed))
        torch.manual_seed(seed)
        return MODELS[self.model]().to(self.device, self.dtype)

    def inputs(self, number: int, rank: int) -> Tensor:
        """A rank's inputs to a micro-step."""
        if isinstance(self.model, Model):
            return batch(number, rank)[:, :1, :SIDE, :SIDE].clamp(-POISON, POISON)
        return batch(number, rank, self.dtype or torch.float32).to(self.device)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05),
    "momentum": functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, eps=1e-4),
}


def _register_power_sgd(model: Any) -> None:
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3, min_compression_rate=0.5)
    model.register_comm_hook(state, powerSGD_hook)


HOOKS: dict[str, Callable[[Any], None]] = {
    "allreduce": lambda model: model.register_comm_hook(None, default_hooks.allreduce_hook),
    "fp16": lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "bf16": lambda model: model.register_comm_hook(dist.group.WORLD, default_hooks.bf16_compress_hook),
    "wrapped": lambda model: model.register_comm_hook(
        None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)
    ),
    "powersgd": _register_power_sgd,
}
COMPRESSING = {"fp16", "bf16", "wrapped"}


def wrap(engine: Callable[..., nn.Module], model: nn.Module, case: Case, **options: Any) -> Any:
    wrapped: Any = engine(
        model,
        bucket_cap_mb=case.bucket_cap_mb,
        find_unused_parameters=case.find_unused,
        gradient_as_bucket_view=case.as_view,
        static_graph=case.static_graph,
        **options,
    )
    wrapped.broadcast_buffers = case.broadcast_buffers
    if case.hook is not None:
        HOOKS[case.hook](wrapped)
    return wrapped


def kept(training: Iterable[tuple[str, Results]]) -> Iterator[tuple[str, Results]]:
    """Copies of a training's results."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")  # of reentrant checkpoints
        for when, results in training:
            yield when, {name: None if value is None else value.detach().clone() for name, value in results.items()}


def difference(ours: Any, theirs: Any, tolerance: float) -> str | None:
    """The differences of two results."""
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        return None if ours is None and theirs is None else f"{ours} instead of {theirs}"
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return f"{ours.dtype} {list(ours.shape)} instead of {theirs.dtype} {list(theirs.shape)}"
    if torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance):
        return None
    return f"{(ours - theirs).abs().max().item()} off, of {theirs.abs().max().item()}"


def first_difference(
    ours: Iterable[tuple[str, Results]], theirs: Iterable[tuple[str, Results]], tolerance: float
) -> str | None:
    """Where two recorded trainings first differ, or None."""
    for (when, results), (_, expected) in zip(ours, theirs, strict=True):
        if list(results) != list(expected):
            return f"{when}: {list(results)} instead of {list(expected)}"
        for name, value in results.items():
            found = difference(value, expected[name], tolerance)
            if found is not None:
                return f"{when}: {name} is {found}"
    return None
