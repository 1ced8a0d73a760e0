"""Uneven inputs: a rank without further batches takes part in the others' collectives until all are finished.

    model = JoinableDistributedDataParallel(network)
    with model.join():  # or torch.distributed.algorithms.join.Join([model, optimizer])
        for batch in batches:  # the ranks may have different numbers of batches
            ...

A rank "joins" when it has finished its batches. Before each forward pass, the others tell the joined ranks which collectives
will follow. See ``_DDPJoinHook`` in torch/nn/parallel/distributed.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from ddp.by_hand.reducer import Reducer
from ddp.by_hand.replicas import broadcast, broadcast_buffers, replicated
from ddp.by_hand.wrapper import HandwrittenDistributedDataParallel


class JoinableDistributedDataParallel(HandwrittenDistributedDataParallel, Joinable):
    """The lesson, for ranks that may have different numbers of batches."""

    has_joined = False  # whether this rank has no batch left
    _join_config = (
        _JoinConfig.construct_disabled_join_config()
    )  # HACK: torch's Join looks for this name, and replaces it
    _divide_by_active = False

    def join(  # type: ignore[override]
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A block in which ranks may have different numbers of batches; see torch's documentation of ``DDP.join``.

        :param divide_by_initial_world_size: average over all ranks; if False, over those that still have batches
        :param enable: whether the block does anything
        :param throw_on_early_termination: raise on all ranks when the first one has no batch left
        """
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **settings: Any) -> JoinHook:
        """Called by ``Join`` when a block begins."""
        self.has_joined = False
        self._divide_by_active = not settings.get("divide_by_initial_world_size", True)
        return _JoinedRank(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the tensors with which ``Join`` counts the ranks."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks that train together."""
        return self.process_group

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def prepare_for_forward(self, synchronize: bool) -> None:
        """Before a forward pass: tell the joined ranks which collectives will follow."""
        active_ranks = Join.notify_join_context(self)
        self.reducer.div_factor = self.process_group.size()
        if active_ranks is not None and self._divide_by_active:
            (number,) = active_ranks.get_future().wait()
            self.reducer.div_factor = number.item()
        super().prepare_for_forward(synchronize)
        if self._join_config.enable:
            self.largest(synchronize)

    def synchronize_buffers(self) -> None:
        """Send the buffers of rank 0 or, if it may have joined, of the last rank that has batches left."""
        source = 0
        if self._join_config.enable and replicated(self.module, parameters=False):
            source = self.largest(-1 if self.has_joined else self.process_group.rank())
        broadcast_buffers(self.module, source, self.process_group)

    def largest(self, value: int) -> int:
        """The largest value of all ranks. A collective."""
        largest = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.process_group)
        return int(largest)


class _JoinedRank(JoinHook):
    """Takes part in the other ranks' collectives after this rank's last batch."""

    def __init__(self, model: JoinableDistributedDataParallel) -> None:
        self._model = model

    def main_hook(self) -> None:
        """Take part in one forward and backward pass of the others: the same collectives in the same order."""
        model = self._model
        model.has_joined = True
        if model.broadcast_buffers and model.require_forward_param_sync:
            model.synchronize_buffers()
        model.require_forward_param_sync = bool(model.largest(0))
        if model.require_forward_param_sync:
            _contribute_zeros(model.reducer)

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have joined: take the weights of one that joined last, and its buffers unless each rank has its own."""
        model = self._model
        source = model.largest(model.process_group.rank() if is_last_joiner else -1)
        tensors = replicated(model.module, buffers=model.broadcast_buffers)
        broadcast(tensors.values(), source, model.process_group)
        # A rank may evaluate alone from here on, also after ``Join([model, optimizer])``.
        model._join_config = _JoinConfig.construct_disabled_join_config()


def _contribute_zeros(reducer: Reducer) -> None:
    """Take part in the other ranks' backward pass without one of this rank, whose ``.grad`` stay what they are."""
    # ``.grad`` may be views of this memory.
    gradients = {kind: memory.clone() for kind, memory in reducer.memory.items()}
    for memory in reducer.memory.values():
        memory.zero_()
    for pending in [reducer.start(index) for index in range(len(reducer.buckets))]:
        pending.wait()
    for kind, memory in reducer.memory.items():
        memory.copy_(gradients[kind])
    reducer.agree_on_used([False] * len(reducer.parameters))
    reducer.rebuild_buckets()
