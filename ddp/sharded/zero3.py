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
import zlib
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from ddp.by_hand.outputs import tensors_in
from ddp.sharded.flat import FlatParameters, in_backward
from ddp.sharded.units import Unit
from ddp.sharded.zero2 import ZeRO2


class ZeRO3(ZeRO2):
    """Shards the optimizer's state, the gradients and the parameters.

    Outside of forward and backward passes the module's parameters are this rank's shards; :meth:`gathered` and
    :meth:`add_forward_method` are for other uses. See :class:`ddp.sharded.zero1.ZeRO1` for the other parameters.
    """

    stage = 3

    def __init__(self, module: nn.Module, *arguments: Any, **more: Any) -> None:
        self._calls: Counter[str] = Counter()  # of units with frozen parameters, whose backward pass is not over
        super().__init__(module, *arguments, **more)
        self._gathers = 0  # a checksum of what was gathered since the last reduction
        self._order: list[Unit] = []  # in which the units run, as seen in the first forward pass
        self._order_is_known = False
        for unit in self.units:
            unit.module.register_forward_hook(functools.partial(self._after_forward, unit), with_kwargs=True)

    def _before_forward(self, unit: Unit, is_model: bool = False, *_: object) -> None:
        super()._before_forward(unit, is_model)
        if in_backward():
            self._gather(unit, -1)
            return
        if unit.module is self.module:
            self._free_all()  # after a forward pass without a backward pass, the root may have parameters of an earlier step
        if not self._order_is_known:
            self._order = [*self._order, unit] if unit.name else [unit]
        self._gather(unit, 1)

    def _after_forward(self, unit: Unit, module: nn.Module, inputs: object, kwargs: object, output: object) -> None:
        if in_backward():  # activation checkpointing: its backward pass comes next
            return
        for flat in self._flats_of[unit.name]:
            flat.end_forward()
        is_root = unit.module is self.module
        self._order_is_known |= is_root
        if not torch.is_grad_enabled():
            self._free_all() if is_root else self._free(unit)
            return
        outputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        for tensor in outputs:
            tensor.register_hook(lambda _: self._before_backward(unit))
        differentiable = [tensor for tensor in tensors_in((inputs, kwargs)) if tensor.requires_grad]
        frozen = [flat for flat in self._flats_of[unit.name] if not flat.trained]
        if frozen and differentiable:
            self._calls[unit.name] += 1
            register_multi_grad_hook(differentiable, lambda _: self._after_backward(unit))
        # The root's backward pass begins at once. Without outputs that autograd knows, no hook will gather the parameters again in
        # backward: then the unit stays whole, unless nothing in it can have a gradient.
        has_no_backward = not outputs and not differentiable and len(frozen) == len(self._flats_of[unit.name])
        if has_no_backward or (outputs and not is_root):
            self._free(unit)

    def _before_backward(self, unit: Unit) -> None:
        """The gradient of a unit's output is known: its backward pass comes next."""
        self._begin_backward()
        self._gather(unit, -1)

    def _after_backward(self, unit: Unit) -> None:
        """The gradients of a unit's inputs are known. That says when frozen parameters are needed no longer, as the gradients of
        the others do; of a unit that was called several times, the last."""
        self._calls[unit.name] -= 1
        self._free_frozen(unit)

    def _free_frozen(self, unit: Unit) -> None:
        flats = self._flats_of[unit.name]
        if (
            unit.name in self._calls
            and self._calls[unit.name] == 0
            and all(flat in self._complete for flat in flats if flat.trained)
        ):
            for flat in flats:
                flat.free()

    def _gather(self, unit: Unit, direction: int) -> None:
        """Gather a unit's parameters, and begin to gather those of the unit that runs after it.

        :param direction: 1 in forward, -1 in backward
        """
        following: list[Unit] = []
        if self._order_is_known and unit in self._order:
            # Before the root, which begins, comes the unit that ran last.
            following = self._order[self._order.index(unit) + direction :][:1]
        for one in (unit, *following):
            flats = [flat for flat in self._flats_of[one.name] if not flat.gathered or flat.outdated]
            for flat in flats:
                flat.start_gather()
            if flats:
                self._gathers = zlib.crc32(one.name.encode(), self._gathers)
        for flat in self._flats_of[unit.name]:
            flat.finish_gather()

    def _free(self, unit: Unit) -> None:
        for flat in self._flats_of[unit.name]:
            flat.free()

    def _free_all(self) -> None:
        self._calls.clear()
        for flat in self.flats:
            flat.free()

    def _ready(self, unit: Unit, flat: FlatParameters, index: int, parameter: Tensor) -> None:
        super()._ready(unit, flat, index, parameter)
        if flat in self._complete:
            flat.free()
            self._free_frozen(unit)

    def _end_pass(self) -> None:
        super()._end_pass()
        self._free_all()  # also those with parameters that were not used, or are frozen

    def _digits_of_gathers(self) -> list[int]:
        digits, self._gathers = [self._gathers >> shift & 63 for shift in (0, 6, 12, 18)], 0
        return digits
