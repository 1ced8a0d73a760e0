"""The stages for programs that do more between passes than ``optimizer.step()``."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp.all_reduce.sharded import ShardedAllReduce
from ddp.by_hand.outputs import tensors_in
from ddp.by_hand.replicas import require_same_modules
from ddp.sharded.protected.flat import ProtectedFlat
from ddp.sharded.protected.initial_values import materialize
from ddp.sharded.protected.refusals import (
    BEFORE_SHARDING,
    AsSharded,
    blind_optimizer,
    parameters_of,
    require_elementwise,
)
from ddp.sharded.units import Unit
from ddp.sharded.zero1 import ZeRO1
from ddp.sharded.zero2 import ZeRO2
from ddp.sharded.zero3 import ZeRO3, in_backward


@functools.cache
def _eagerly() -> Callable[..., Any]:
    """A function that calls another one, which is not compiled. Made when needed, since this imports the compiler."""
    return torch.compiler.disable(lambda function, *inputs, **kwargs: function(*inputs, **kwargs))  # type: ignore[no-any-return]


class ProtectedZeRO1(ZeRO1):
    """See :class:`ddp.sharded.zero1.ZeRO1` for the other parameters. The module may be on the meta device.

    :param device: where to put what is on the meta device
    :raises ValueError: on every rank, if the modules differ, for units that :func:`ddp.sharded.units.divide` refuses, and for
        :data:`ddp.sharded.protected.refusals.BEFORE_SHARDING`
    """

    flat_class = ProtectedFlat
    flats: list[ProtectedFlat]  # type: ignore[assignment]
    _flats_of: dict[str, list[ProtectedFlat]]  # type: ignore[assignment]

    def __init__(
        self,
        module: nn.Module,
        units: Iterable[nn.Module] | None,
        collectives: tuple[ShardedAllReduce, ShardedAllReduce],
        compute: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        for refuse in BEFORE_SHARDING:
            refuse(module)
        require_same_modules(module, {"stage": self.stage, "compute": compute}, dist.group.WORLD)
        self._device = torch.device(device)
        self._in_forward = self._in_gathered = False
        self._checksum = 0  # names of the units gathered since the last reduction, in their order
        super().__init__(module, units, collectives, compute)
        self._as_sharded = AsSharded(module, self.flats)
        self._finite = True  # whether the last gradients were, on all ranks
        self._hooks.append(register_optimizer_step_pre_hook(self._before_step))
        module.register_forward_hook(self._end_forward, always_call=True)
        module.register_load_state_dict_pre_hook(self._require_copies)
        for part in module.modules():
            part.register_state_dict_pre_hook(self._require_copies)

    def _add(self, unit: Unit) -> None:
        materialize(unit, self._device)  # at stage 3, one unit at a time is whole
        super()._add(unit)
        # Any layer may be called by itself. At stage 3, only units gather.
        layers = {part for owners in unit.owners.values() for part, _ in owners if self.stage < 3}
        for part in {unit.module, *layers}:
            part.register_forward_pre_hook(functools.partial(self._begin_forward, part is self.module), prepend=True)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """``module``'s forward. ``torch.compile`` of this model leaves it as it is: its hooks replace parameters."""
        return _eagerly()(self._forward, *inputs, **kwargs)

    def _forward(self, *inputs: Any, **kwargs: Any) -> Any:
        output = super().forward(*inputs, **kwargs)
        # The backward pass begins at an output. (A reentrant checkpoint inside runs a pass of its own, whose end is not this one's.)
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._begin_backward())
        return output

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the shards, and those that ``no_sync`` has kept. (An optimizer's ``zero_grad`` knows the shards.)"""
        super().zero_grad(set_to_none)
        for flat in self.flats:
            flat.drop_gradient()

    # Whole parameters, for users

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """A block in which ``module`` holds copies of its parameters, whole, as the last step left them, and in the dtype in which
        they are optimized. What is read may be kept; what all ranks write alike is taken back. A collective.

        :raises RuntimeError: within another such block
        """
        if self._in_gathered:
            raise RuntimeError("gathered() is within another, whose copies would be lost")
        self._refuse_changes()
        for flat in self.flats:
            flat.install_copies()
        self._in_gathered = True
        try:
            yield self.module
        finally:
            self._in_gathered = False
            self._refuse_changes()
            for flat in self.flats:
                flat.take_back_copies()
            self._gather_all()

    def _require_copies(self, *_: object) -> None:
        """:raises RuntimeError: where a ``state_dict`` would hold shards, or another dtype than is optimized, or would not reach shards"""
        if not self._in_gathered:
            raise RuntimeError(
                "the parameters may not be whole, and load_state_dict() does not reach the shards: load the weights before shard(), or "
                "call state_dict() and load_state_dict() in `with model.gathered():` on all ranks"
            )

    def _refuse_copies(self) -> None:
        """:raises RuntimeError: where a pass would compute with the copies, whose gradients nothing averages"""
        if self._in_gathered:
            raise RuntimeError("within gathered() the network holds copies, to be read and written: run it outside")

    def __reduce_ex__(self, protocol: object) -> Any:
        """:raises TypeError: since a copy would have no shards and no connections of its own"""
        raise TypeError(
            "a sharded model cannot be copied or pickled: in `with model.gathered() as module:`, take module.state_dict()"
        )

    # Before and in a forward pass

    def _begin_forward(self, is_model: bool, *_: object) -> None:
        """A unit, or a layer of it, is about to run: its parameters must be those of the last step.

        :param is_model: whether it is the whole model
        """
        if in_backward():
            return
        self._refuse_copies()
        if self._running:  # an exception ended that pass, so that autograd did not call _finish
            self._running = False
            for flat in self.flats:
                flat.drop_gradient()
            self._end_pass()
        if is_model or not self._in_forward:
            self._refuse_changes()
            if any(flat.written for flat in self.flats):
                self._gather_all()
        self._in_forward |= is_model

    def _refuse_changes(self) -> None:
        self._as_sharded.changed_parameters()
        self._as_sharded.later_modules()

    def _end_forward(self, *_: object) -> None:
        """The model has run, or failed."""
        self._in_forward = False
        if not in_backward():
            for flat in self.flats:
                flat.keep_writes()

    # In and after a backward pass

    def _begin_backward(self) -> None:
        self._refuse_copies()
        if not self._running:
            for flat in self.flats:
                flat.bump_versions()
        super()._begin_backward()

    @torch.no_grad()
    def _finish(self) -> None:
        super()._finish()
        if self._synchronizes:
            self._agree()
            for flat in self.flats:
                flat.run_hooks()

    def _agree(self) -> None:
        """Treat the gradients alike on all ranks, after one small all-gather of what each rank knows.

        - If any shard is not finite, nans are put into all of them. A rank sees its own shards only, and if it skipped a step for an
          inf in them alone, the model would be torn apart. So every GradScaler, and code that looks at shards, skips it everywhere.
        - A parameter that no rank has used gets no gradient, as in DDP.

        :raises RuntimeError: on every rank, if the ranks have not gathered the same units in the same order
        """
        gradients = [one.grad for one in self.parameters() if one.grad is not None and one.numel()]
        # On CPUs the usual norm is much faster than the largest absolute value. But its squares overflow: 1e20 squared is inf.
        finite = any(torch.nn.utils.get_total_norm(gradients, order).isfinite() for order in (2.0, torch.inf))
        used = [one for flat in self.flats for one in flat.used]
        # A row per rank: finite; for each parameter, used; the checksum's four bytes.
        own = torch.tensor(
            [finite, *used, *self._checksum.to_bytes(4, "big")], dtype=torch.uint8, device=self.flats[0].device
        )
        everyone = own.new_empty(self.process_group.size(), len(own))
        everyone[self.process_group.rank()] = own
        self._collectives[1].all_gather(everyone.view(-1))
        finite_on, *by_parameter = zip(*everyone.tolist(), strict=True)
        self._finite, self._checksum = all(finite_on), 0
        used_anywhere = map(any, by_parameter)
        for flat in self.flats:
            flat.finalize([next(used_anywhere) for _ in flat.owners], self._finite)
        if any(len({*digits}) > 1 for digits in by_parameter[-4:]):  # the checksums differ
            raise RuntimeError(
                "the ranks have run different units, or in another order, so each was given parameters of others: at stage 3 "
                "all ranks must run the same units. Put those that they choose between into one unit"
            )

    # Before and after an optimizer's step

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for flat in self.flats:
            flat.keep_writes()
        if shards := set(self.parameters()).intersection(parameters_of(optimizer)):
            require_elementwise(optimizer)
            if not self._finite:
                blind_optimizer(shards)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """An optimizer has stepped. Count it as a write to the shards, which fused optimizers do not, and gather them."""
        increment_version(set(self.parameters()).intersection(parameters_of(optimizer)))
        if not self._in_gathered:
            super()._after_step(optimizer)


class ProtectedZeRO2(ProtectedZeRO1, ZeRO2):
    """Stage 2. See :class:`ProtectedZeRO1` for the parameters."""


class ProtectedZeRO3(ProtectedZeRO2, ZeRO3):
    """Stage 3. See :class:`ProtectedZeRO1` for the parameters."""

    def _start_gather(self, unit: Unit) -> None:
        if any(flat.outdated for flat in self._flats_of[unit.name]):
            self._checksum = zlib.crc32(unit.name.encode(), self._checksum)
        super()._start_gather(unit)
