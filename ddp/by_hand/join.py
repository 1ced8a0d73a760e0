"""Uneven inputs: a rank that has run out of batches shadows the others' collectives until all have (``Join``).

    with model.join():  # or torch.distributed.algorithms.join.Join([model, optimizer])
        for batch in batches:  # of which the ranks may have different numbers
            ...

Every forward pass tells the ranks that have joined what will follow. torch's own: torch/nn/parallel/distributed.py,
``_DDPJoinHook``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ddp.by_hand.replicas import broadcast, replicated

if TYPE_CHECKING:
    from ddp.by_hand.wrapper import Reducer


class UnevenInputs(Joinable):
    """The part of a DDP wrapper that lets ranks have different numbers of inputs."""

    module: nn.Module
    device: torch.device
    process_group: dist.ProcessGroup
    broadcast_buffers: bool
    require_forward_param_sync: bool
    reducer: Reducer
    _divide_by_active = False

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A block in which ranks may run out of inputs one after the other; see torch's documentation of ``DDP.join``.

        :param divide_by_initial_world_size: average over all ranks, or else over those that still have inputs
        """
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **settings: Any) -> JoinHook:
        """Called by ``Join``."""
        self._divide_by_active = not settings.get("divide_by_initial_world_size", True)
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """Of the tensors with which ``Join`` counts the ranks."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks that train together."""
        return self.process_group

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def announce_forward(self, synchronize: bool) -> None:
        """Before a forward pass: bring the buffers up to date, if they may differ, and tell the ranks that have joined."""
        alive = Join.notify_join_context(self)
        self.reducer.divisor = self.process_group.size()
        if alive is not None and self._divide_by_active:
            (active,) = alive.get_future().wait()
            self.reducer.divisor = active.item()
        self._synchronize_buffers(self.process_group.rank())
        if self._join_config.enable:
            self._largest(synchronize)
        self.require_forward_param_sync = synchronize

    def _synchronize_buffers(self, candidate: int) -> None:
        """Rank 0's buffers go to all; when rank 0 may have joined, those of the highest ``candidate``."""
        if not (self.broadcast_buffers and self.require_forward_param_sync):
            return
        buffers = list(replicated(self.module, parameters=False).values())
        if buffers:
            source = self._largest(candidate) if self._join_config.enable else 0
            # An earlier forward pass may have saved a buffer for its backward pass, which need not know.
            with torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):  # type: ignore[attr-defined]
                broadcast(buffers, source, self.process_group)

    def _largest(self, value: int) -> int:
        largest = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.process_group)
        return int(largest)


class _Shadow(JoinHook):
    """What a rank does that has no more inputs."""

    def __init__(self, model: UnevenInputs) -> None:
        self._model = model

    def main_hook(self) -> None:
        """One forward and backward pass of the others: their collectives, in their order."""
        model = self._model
        model._synchronize_buffers(-1)
        model.require_forward_param_sync = bool(model._largest(0))
        if model.require_forward_param_sync:
            model.reducer.join_backward()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Nobody has any: all take the weights of one that went on to the end, and its buffers unless each has its own."""
        model = self._model
        source = model._largest(model.process_group.rank() if is_last_joiner else -1)
        tensors = replicated(model.module, buffers=model.broadcast_buffers)
        broadcast(list(tensors.values()), source, model.process_group)
