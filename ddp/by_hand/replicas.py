"""Replicas: all ranks begin with the same module, and keep the same buffers.

At the end stand the questions that the wrappers ask autograd about the backward pass that runs.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp.by_hand.buckets import DEFAULT_LIMITS, assign_buckets


def make_equal(
    module: nn.Module,
    settings: Mapping[str, object] | None = None,
    group: dist.ProcessGroup | None = None,
    buffers: bool = True,
) -> None:
    """Give all ranks rank 0's parameters and, if ``buffers``, its buffers; see :func:`require_same_modules`.

    :raises NotImplementedError: for a parameter or buffer that cannot be sent
    """
    tensors = replicated(module, buffers=buffers)
    _require_sendable(tensors)
    require_same_modules(module, settings or {}, group, buffers)
    broadcast(tensors.values(), 0, group)


def require_same_modules(
    module: nn.Module, settings: Mapping[str, object], group: dist.ProcessGroup | None = None, buffers: bool = True
) -> None:
    """Compare the ranks' modules before tensors are sent: with differing shapes, collectives hang or mix up values.

    :param module: this rank's
    :param settings: other values that must be the same on all ranks
    :param group: the default group when None
    :param buffers: whether buffers are compared too; False where each rank may have its own
    :raises RanksDiffer: on every rank, naming the first parameter, buffer or setting that differs, and the ranks
    """
    mine = {name: _describe(tensor) for name, tensor in replicated(module, buffers=buffers).items()}
    mine |= {name: str(value) for name, value in settings.items()}
    everyone: list[dict[str, str]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    if all(list(theirs.items()) == list(mine.items()) for theirs in everyone):
        return
    # Imported on failure only: a DDP job needs none of it.
    from common.distributed.agreement import RanksDiffer, differences

    texts = differences(dict(enumerate(everyone)))
    raise RanksDiffer(f"the ranks' modules differ: {texts[0] if texts else 'their parameters are in another order'}")


def require_hooked(module: nn.Module, hooked: Container[int]) -> None:
    """Check that a wrapper's hooks are on all parameters whose gradients are averaged.

    :param hooked: the ``id`` of each parameter with a hook
    :raises RuntimeError: naming the first one without
    """
    for name, parameter in trained_parameters(module).items():
        if id(parameter) not in hooked:
            raise RuntimeError(f"{name} was replaced, unfrozen or copied after it was wrapped: wrap the module again")


def refuse_early_steps(wrapper: nn.Module, hooked: Container[int], too_early: Callable[[], bool]) -> None:
    """Raise if an optimizer steps before the gradients are averaged: the ranks' weights would drift apart.

    :param wrapper: the check lasts as long
    :param hooked: as in :func:`require_hooked`
    :param too_early: whether a backward pass runs whose gradients are no averages yet
    """

    def refuse(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if too_early() and any(id(one) in hooked for group in optimizer.param_groups for one in group["params"]):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called in a backward pass, with gradients that are not averaged over the ranks "
                "yet: call it after backward"
            )

    weakref.finalize(wrapper, register_optimizer_step_pre_hook(refuse).remove)


def replicated(module: nn.Module, parameters: bool = True, buffers: bool = True) -> dict[str, Tensor]:
    """Parameters and buffers by name, without those in ``module._ddp_params_and_buffers_to_ignore``, as in torch's DDP."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    named = (module.named_parameters() if parameters else (), module.named_buffers() if buffers else ())
    return {name: tensor for name, tensor in itertools.chain(*named) if name not in ignored}


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters whose gradients are averaged, by name."""
    tensors = replicated(module, buffers=False).items()
    return {name: cast("nn.Parameter", tensor) for name, tensor in tensors if tensor.requires_grad}


@torch.inference_mode()  # inference tensors can be written only in this mode
def broadcast(tensors: Iterable[Tensor], source: int, group: dist.ProcessGroup | None) -> None:
    """Overwrite the tensors with those of rank ``source`` of the group; many small ones travel in one message."""
    # Stride 0: all elements along this dimension share their memory, so one is sent.
    firsts = [t.detach()[tuple(slice(None if stride else 1) for stride in t.stride())] for t in tensors]
    for bucket in assign_buckets(firsts, DEFAULT_LIMITS[-1:]):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.broadcast(flat.view(torch.uint8), group=group, group_src=source)  # as bytes: works for any dtype
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def broadcast_buffers(module: nn.Module, source: int, group: dist.ProcessGroup) -> None:
    """Overwrite the module's buffers with those of rank ``source``."""
    if buffers := replicated(module, parameters=False).values():
        # The version stays the same: a pending backward pass would refuse a changed buffer.
        with torch.autograd._unsafe_preserve_version_counter(  # type: ignore[attr-defined]
            tuple(buffer for buffer in buffers if not buffer.is_inference())
        ):
            broadcast(buffers, source, group)


def _describe(tensor: Tensor) -> str:
    frozen = "" if tensor.requires_grad else ", without gradient"
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}{frozen}".removeprefix("torch.")


def _require_sendable(tensors: Mapping[str, Tensor]) -> None:
    """:raises NotImplementedError: naming the first that is sparse or quantized"""
    for name, tensor in tensors.items():
        kind = tensor.dtype if tensor.is_quantized else tensor.layout
        if kind is not torch.strided:
            raise NotImplementedError(
                f"{name} is {str(kind).removeprefix('torch.')} and cannot be sent to other ranks: turn it into a dense tensor, or name "
                "it in module._ddp_params_and_buffers_to_ignore"
            )


def current_pass() -> int:
    """The id of the backward pass that runs on this thread; -1 if none does."""
    # HACK: torch has no public name for this. If it renames it, every wrapper's backward pass is an AttributeError.
    return torch._C._current_graph_task_id()


def current_node() -> torch.autograd.graph.Node | None:
    """The node of the graph that runs on this thread; None if none does, as when compiled autograd traces the pass."""
    # HACK: as in ``current_pass``.
    return torch._C._current_autograd_node()


def in_backward() -> bool:
    """Whether a backward pass runs. A forward pass within one only repeats another, for activation checkpointing."""
    return current_pass() != -1


def within_another_pass() -> bool:
    """Asked in a callback at the end of a backward pass: whether it is part of another one, as in reentrant checkpoints."""
    # A callback runs after the last node. If one still runs, it belongs to an outer pass.
    return current_node() is not None
