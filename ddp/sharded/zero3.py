"""ZeRO stage 3: the parameters are sharded too. No rank ever holds the whole model.

    with torch.device("meta"):
        network = build()
    model = shard(network, stage=3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(inputs).sum().backward()
    optimizer.step()

The parameters of a unit are gathered just before it runs, and freed just after, in forward and again in backward:

    forward     gather 1 | run 1, gather 2 | free 1, run 2, gather 3 | ...
    backward    gather 3 | run 3, gather 2 | free 3, reduce-scatter 3, run 2, gather 1 | ...

The next unit is gathered while the present one runs, so a rank holds two units at a time. Three times the parameters are
sent in a step, instead of twice: gathered, gathered again, and the gradients reduce-scattered. (arXiv 1910.02054, sections
5.3 and 7.2. torch's own: torch/distributed/fsdp/_fully_shard.)
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ddp.by_hand.outputs import tensors_in
from ddp.sharded.flat import FlatParameters
from ddp.sharded.units import Unit
from ddp.sharded.zero2 import ZeRO2


class ZeRO3(ZeRO2):
    """Shards the optimizer's state, the gradients and the parameters. Outside of forward and backward passes the module's
    parameters are this rank's shards. See :class:`ddp.sharded.zero1.ZeRO1` for the parameters."""

    stage = 3

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._order: list[Unit] = []  # the units as they ran in the first forward pass, the root first
        self._order_is_known = False

    def _add(self, unit: Unit) -> None:
        super()._add(unit)
        self._free(unit)
        # Before the user's hooks, which may compute with the parameters.
        unit.module.register_forward_pre_hook(functools.partial(self._before_forward, unit), prepend=True)
        unit.module.register_forward_hook(functools.partial(self._after_forward, unit))

    def _before_forward(self, unit: Unit, *_: object) -> None:
        if in_backward():  # activation checkpointing runs forward again
            self._gather(unit, -1)
            return
        if not unit.name:
            self._free_all()  # if no backward pass came after the last forward pass, the root still has old parameters
        if not self._order_is_known:
            self._order = [*self._order, unit] if unit.name else [unit]  # the root runs first: begin anew
        self._gather(unit, 1)

    def _after_forward(self, unit: Unit, module: nn.Module, inputs: object, output: object) -> None:
        if in_backward():  # activation checkpointing: the unit's backward pass comes next
            return
        self._order_is_known |= not unit.name  # the root ends last: all units have run
        if not torch.is_grad_enabled():  # no backward pass comes
            self._free(unit) if unit.name else self._free_all()
            return
        outputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        for tensor in outputs:
            tensor.register_hook(lambda _: self._before_backward(unit))
        # The root stays whole, since its backward pass begins at once. So does a unit whose outputs have no grad_fn: no hook would
        # gather it in backward.
        if outputs and unit.name:
            self._free(unit)

    def _before_backward(self, unit: Unit) -> None:
        """The gradient of a unit's output is known: its backward pass comes next."""
        self._begin_backward()
        self._gather(unit, -1)

    def _ready(self, flat: FlatParameters, index: int, parameter: Tensor) -> None:
        super()._ready(flat, index, parameter)
        if flat in self._complete:
            flat.free()

    def _end_pass(self) -> None:
        super()._end_pass()
        self._free_all()  # also those with parameters that were not used

    def _gather(self, unit: Unit, direction: int) -> None:
        """Gather a unit's parameters, and begin to gather those of the unit that runs after it.

        :param direction: 1 in forward, -1 in backward
        """
        self._start_gather(unit)
        if self._order_is_known and unit in self._order:
            # In backward the root (index 0) comes first, then index -1: the unit that ran last. In forward nothing follows that one.
            for following in self._order[self._order.index(unit) + direction :][:1]:
                self._start_gather(following)
        for flat in self._flats_of[unit.name]:
            flat.finish_gather()

    def _start_gather(self, unit: Unit) -> None:
        for flat in self._flats_of[unit.name]:
            if flat.outdated:
                flat.start_gather()

    def _gather_all(self) -> None:
        """After an optimizer's step nothing is gathered: the next forward pass does it, unit by unit."""

    def _free(self, unit: Unit) -> None:
        for flat in self._flats_of[unit.name]:
            flat.free()

    def _free_all(self) -> None:
        for flat in self.flats:
            flat.free()


def in_backward() -> bool:
    """Whether autograd is running: activation checkpointing runs forward within backward."""
    # HACK: torch has no public name for this. FSDP asks the same.
    return torch._C._current_graph_task_id() != -1
