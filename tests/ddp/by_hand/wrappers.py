"""A model of the zoo in one training loop, wrapped once by torch's DDP and once by the one under test, compared step by step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ddp.by_hand.wrapper import HandwrittenDistributedDataParallel
from tests.support.zoo.named import MODELS, UNUSED, batch, loss_of

Results = dict[str, Tensor | None]
Wrapper = DistributedDataParallel | HandwrittenDistributedDataParallel

# Training


@dataclass(frozen=True)
class Case:
    """A way to train a model.

    :param bucket_cap_mb, as_view, find_unused, static_graph, broadcast_buffers: the wrapper's
    :param grad_accumulation_steps: backward passes per optimizer step, all but the last under ``no_sync``
    :param evaluate: whether there is a forward pass without gradients after each step
    :param hook: of :data:`HOOKS`
    :param optimizer: of :data:`OPTIMIZERS`
    :param clip: the norm to which gradients are clipped
    :param dtype: of the whole model, if not its own
    :param device: of the model and its inputs
    """

    model: str
    bucket_cap_mb: float | None = None
    as_view: bool = True
    find_unused: bool = False
    static_graph: bool = False
    broadcast_buffers: bool = True
    grad_accumulation_steps: int = 1
    set_to_none: bool = True
    evaluate: bool = False
    hook: str | None = None
    optimizer: str = "momentum"
    clip: float | None = None
    steps: int = 20
    dtype: torch.dtype | None = None
    device: str = "cpu"

    def network(self, seed: int) -> nn.Module:
        """The model, with weights of their own for each seed."""
        torch.manual_seed(seed)
        return MODELS[self.model]().to(self.device, self.dtype)


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


def wrap(engine: type[Wrapper], model: nn.Module, case: Case, **options: Any) -> Any:
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


def run_micro_step(
    model: Any, step: int, micro_step: int, micro_steps: int, dtype: torch.dtype | None, device: str = "cpu"
) -> Tensor:
    """Forward and backward of one micro-step of a step, all but the last under ``no_sync``; returns the loss."""
    number = step * micro_steps + micro_step
    torch.manual_seed(1000 * number + dist.get_rank())
    x = batch(number, dtype or torch.float32).to(device)
    with contextlib.nullcontext() if micro_step == micro_steps - 1 else model.no_sync():
        loss = loss_of(model(x, number=number))
        loss.backward()
    return loss


def train(engine: type[Wrapper], case: Case, **options: Any) -> Iterator[tuple[str, Results]]:
    """Named results, step by step: losses, gradients, parameters and buffers."""
    # The ranks' models start with different weights, so that the wrapper has to make them one.
    network = case.network(dist.get_rank())
    model = wrap(engine, network, case, **options)
    yield "after wrapping", dict(network.state_dict())
    optimizer = OPTIMIZERS[case.optimizer](network.parameters())
    for step in range(case.steps):
        for micro_step in range(case.grad_accumulation_steps):
            loss = run_micro_step(model, step, micro_step, case.grad_accumulation_steps, case.dtype, case.device)
            results = {name: parameter.grad for name, parameter in network.named_parameters()}
            yield f"gradients of step {step}.{micro_step}", {"loss": loss, **results}
        if case.clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=case.set_to_none)
        results = {name: parameter.grad for name, parameter in network.named_parameters()}
        yield f"gradients zeroed in step {step}", results
        if case.evaluate:
            with torch.no_grad() if step % 2 else torch.inference_mode():
                model(batch(-step - 1, case.dtype or torch.float32).to(case.device), number=step)
    yield "after training", {**model.state_dict(), **dict(model.named_buffers())}


def recorded(engine: type[Wrapper], case: Case, **options: Any) -> list[tuple[str, Results]]:
    """All of :func:`train`, kept."""
    return kept(train(engine, case, **options))


def kept(training: Iterable[tuple[str, Results]]) -> list[tuple[str, Results]]:
    """Run a training, and keep copies of its results."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")  # of reentrant checkpoints
        return [
            (when, {name: None if value is None else value.detach().clone() for name, value in results.items()})
            for when, results in training
        ]


def difference(ours: Any, theirs: Any, tolerance: float) -> str | None:
    """The differences of two results."""
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        return None if ours is None and theirs is None else f"{ours} instead of {theirs}"
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return f"{ours.dtype} {list(ours.shape)} instead of {theirs.dtype} {list(theirs.shape)}"
    if torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance):
        return None
    return f"{(ours - theirs).abs().max().item()} off, of {theirs.abs().max().item()}"


def as_torch_can(case: Case) -> Case:
    """The same training, for torch's DDP, which cannot do all that the hand-written one can."""
    find_unused, static_graph = case.find_unused, case.static_graph
    if case.grad_accumulation_steps > 1 or case.model == "inside":
        # A static graph must not begin with no_sync; what hides in an object of its own is not averaged in the first step.
        find_unused, static_graph = find_unused or (static_graph and case.model in UNUSED), False
    if case.model == "reentrant" or static_graph:
        find_unused = False  # fails there, and is of no use here
    hook = (
        "bf16" if case.hook == "wrapped" else case.hook
    )  # the same, but it leaves no gradients of its own dtype behind
    return dataclasses.replace(case, find_unused=find_unused, static_graph=static_graph, hook=hook)


def compare(case: Case, tolerance: float = 0, **options: Any) -> str | None:
    """Train with both engines.

    :param tolerance: relative and absolute; 0 for the same bits
    :param options: of the hand-written one
    :returns: where the results first differ
    """
    theirs = recorded(DistributedDataParallel, as_torch_can(case))
    ours = recorded(HandwrittenDistributedDataParallel, case, **options)
    found = first_difference(ours, theirs, tolerance)
    return found and f"{case}: {found}"


def first_difference(
    ours: Sequence[tuple[str, Results]], theirs: Sequence[tuple[str, Results]], tolerance: float
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
