"""ZeRO stage 1: all ranks compute with all parameters, and each optimizes only its own shard of them.

    model = shard(network, stage=1)
    optimizer = torch.optim.AdamW(model.parameters())  # of this rank's shards: its state is a p-th of DDP's
    model(inputs).sum().backward()                     # the gradients of the shards are now averages over the ranks
    optimizer.step()                                   # of this rank's shards; then the new parameters are gathered

In DDP every rank takes the same step, p times the same work and p times the same optimizer state. Here a step is

    forward, backward  ->  reduce-scatter of gradients  ->  step of one shard  ->  all-gather of parameters

The last three are ``_reduce``, called when autograd is done; the optimizer's own step; and ``_after_step``, which torch's
optimizers call. (In the next forward pass, the gather could be hidden behind the first units. But what reads the weights in
between would read old ones.)

The two collectives together are DDP's all-reduce, with the step in between: as many bytes, and the same bits.
(Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020, arXiv 1910.02054, section 5.1.)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

from ddp.all_reduce.sharded import ShardedAllReduce
from ddp.by_hand.outputs import tensors_in
from ddp.by_hand.replicas import broadcast, require_same_modules
from ddp.sharded.flat import FlatParameters, Precision, in_backward
from ddp.sharded.units import Unit, by_dtype, divide, materialize

DEFAULT_PRECISION = Precision()


class ZeRO1(nn.Module):
    """Shards the optimizer's state of ``module`` over the ranks. The module's parameters are replaced: build the optimizer
    from this wrapper's :meth:`parameters`, which are this rank's shards, by the names of the whole ones.

    :param module: the same on every rank, but for the values: those of rank 0 are sent to all. It may be on the meta device
    :param units: the submodules whose parameters travel together, see :func:`ddp.sharded.units.divide`
    :param precision: the dtypes of computation and communication, of all units or by unit; the model's own counts for the root
    :param collectives: one for parameters and one for gradients, since these are sent at the same time, each kind in an order of
        its own
    :param device: where to put what is on the meta device
    :raises ValueError: on every rank, if the modules differ, if the units are no division of the model, if a precision is given for
        a module that is no unit, or if nothing is trained
    """

    stage = 1

    def __init__(
        self,
        module: nn.Module,
        units: Iterable[nn.Module] | None,
        collectives: tuple[ShardedAllReduce, ShardedAllReduce],
        precision: Precision | Mapping[nn.Module, Precision] = DEFAULT_PRECISION,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        group = dist.distributed_c10d._get_default_group()
        by_unit, default = (precision, DEFAULT_PRECISION) if isinstance(precision, Mapping) else ({}, precision)
        precisions = {name: by_unit.get(part, default) for name, part in module.named_modules()}
        require_same_modules(module, {"stage": self.stage, "precision": precisions}, group)
        self.module, self.process_group = module, group
        self._collectives = collectives
        self._names = list(dict(module.named_parameters()))
        self._running = False  # a backward pass
        self._local: set[FlatParameters] = set()  # whose gradients are not sent, within no_sync
        self.flats: list[FlatParameters] = []
        self._hooks: list[Any] = []
        self._flats_of: dict[str, list[FlatParameters]] = {}
        self.units = divide(module, units)
        for part in by_unit:
            self._unit(part)  # that of another would be ignored
        for unit in self.units:
            own = precisions[unit.name]
            materialize(unit, torch.device(device))  # at stage 3, one unit at a time is whole
            flats = self._flats_of[unit.name] = [
                FlatParameters(owners, group, self._collectives, own, self.stage)
                for owners in by_dtype(unit, trained_only=self.stage < 3)
            ]
            self.flats += flats
            self._free(unit)
            for flat in flats:
                for index, parameter in enumerate(flat.whole if flat.trained else ()):
                    ready = functools.partial(self._ready, unit, flat, index)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(ready))
            # Any layer may be called by itself. At stage 3, only units gather.
            layers = {part for owners in unit.owners.values() for part, _ in owners if self.stage < 3}
            for part in {unit.module, *layers}:
                part.register_forward_pre_hook(functools.partial(self._before_forward, unit, part is module))
            if own.cast_inputs:
                unit.module.register_forward_pre_hook(functools.partial(_cast, own.compute), with_kwargs=True)
        self._trained: list[FlatParameters] = []
        if not any(flat.trained and flat.shard_numel for flat in self.flats):
            raise ValueError(f"{type(module).__name__} has no parameters to train")
        self._frozen = {name: one for name, one in module.named_parameters() if not one.requires_grad}
        replicated = self._frozen.values() if self.stage < 3 else ()  # at stage 3 they are sharded, too
        broadcast([*replicated, *module.buffers()], 0, group)
        self._hooks += [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._remember_modules()
        self._stale = False  # a backward pass is over, so the shards will change
        self._finite = True  # the last gradients, on all ranks
        self._in_forward = self._in_gathered = False
        module.register_forward_hook(self._end_forward, always_call=True)
        module.register_load_state_dict_pre_hook(self._refuse_to_load)
        for part in module.modules():
            part.register_state_dict_pre_hook(self._require_whole)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """``module``'s forward."""
        output = self.module(*inputs, **kwargs)
        # The backward pass begins at an output. (A reentrant checkpoint inside runs a pass of its own, whose end is not this one's.)
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._begin_backward())
        return output

    def _require_whole(self, *_: object) -> None:
        """:raises RuntimeError: where a ``state_dict`` would hold shards, or parameters in another dtype than is optimized"""
        if not self._in_gathered:
            raise RuntimeError(
                "the parameters may not be whole: call state_dict() in `with model.gathered():` on all ranks"
            )

    def _refuse_to_load(self, *_: object) -> None:
        """:raises RuntimeError: where what is loaded would not reach the shards that are optimized"""
        if not self._in_gathered:
            raise RuntimeError(
                "load_state_dict() does not reach the shards: load the weights before shard(), or in `with model.gathered():`"
            )

    def __reduce_ex__(self, protocol: object) -> Any:
        """:raises TypeError: since a copy would have no shards and no connections of its own"""
        raise TypeError(
            "a sharded model cannot be copied or pickled: in `with model.gathered() as module:`, take module.state_dict()"
        )

    def close(self) -> None:
        """Free the threads and connections of the collectives; the model cannot be trained further."""
        for collectives in self._collectives:
            collectives.close()
        for hook in self._hooks:  # autograd holds them, which hold this model: a cycle that Python cannot see
            hook.remove()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards by the parameters' names, in the order of ``module.named_parameters()``; ``parameters()`` too."""
        sharded = {name: one for flat in self.flats for name, one in zip(flat.owners, flat.sharded, strict=True)}
        for name in self._names:
            if name in sharded:
                yield f"{prefix}.{name}" if prefix else name, sharded[name]

    @contextlib.contextmanager
    def no_sync(self, *units: nn.Module) -> Iterator[None]:
        """Within this block, backward passes add to the gradients on this rank alone, which stay whole until the next that
        synchronizes.

        :param units: if given, only their gradients
        :raises ValueError: if one of them is no unit
        """
        before = self._local
        chosen = [flat for part in units for flat in self._flats_of[self._unit(part).name]]
        self._local = {*before, *(chosen if units else self.flats)}
        try:
            yield
        finally:
            self._local = before

    def add_forward_method(self, module: nn.Module, name: str) -> None:
        """Let another method of a unit, or of the model, gather parameters as ``forward`` does.

        :raises ValueError: if the module is no unit
        """
        unit = self._unit(module)
        method = getattr(module, name)

        @functools.wraps(method)
        def gathering(*inputs: Any, **kwargs: Any) -> Any:
            self._before_forward(unit)
            output = method(*inputs, **kwargs)
            self._after_forward(unit, module, inputs, kwargs, output)
            return output

        setattr(module, name, gathering)

    def _unit(self, module: nn.Module) -> Unit:
        for unit in self.units:
            if unit.module is module:
                return unit
        raise ValueError(
            f"{type(module).__name__} is no unit: only units have a precision, gather their parameters, and send their gradients"
        )

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """A block in which ``module`` holds copies of its parameters, whole, as the last step left them, and in the dtype in which
        they are optimized. What is read may be kept; what all ranks write alike is taken back. A collective.

        :raises RuntimeError: within another such block
        """
        if self._in_gathered:
            raise RuntimeError("gathered() is within another, whose copies would be lost")
        for flat in self.flats:
            flat.copy_whole()
        self._in_gathered = True
        try:
            yield self.module
        finally:
            self._in_gathered = False
            for flat in self.flats:
                flat.end_copy()
            self._gather_all()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the shards, and those that ``no_sync`` has kept. (An optimizer's ``zero_grad`` knows the shards.)"""
        super().zero_grad(set_to_none)
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for flat in self.flats:
            flat.drop_gradient()

    # The parameters: after an optimizer's step, and before and in a forward pass

    def _before_step(self, *_: object) -> None:
        for flat in self.flats:
            flat.keep_writes()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """An optimizer has stepped. If it has these shards, all ranks gather the new parameters.

        Not after an inf or nan. Code that looks at its rank's shards skips that step, but not on a rank where these are empty,
        which would wait for the others in the gather.
        """
        stepped = {one for group in optimizer.param_groups for one in group["params"]}
        if self._finite and not self._in_gathered and not stepped.isdisjoint(self.parameters()):
            self._gather_all()

    def _gather_all(self) -> None:
        """Gather all parameters; none at stage 3."""
        if self.stage < 3:
            self._stale = False
            for flat in self.flats:
                flat.follow_user()
                flat.start_gather()
            for flat in self.flats:
                flat.finish_gather()

    def _free(self, unit: Unit) -> None:
        """Free a unit's whole parameters, at stage 3."""

    def _before_forward(self, unit: Unit, is_model: bool = False, *_: object) -> None:
        """A unit, or a layer of it, is about to run: its parameters must be those of the last step.

        :param is_model: whether it is the whole model
        """
        if self._running and not in_backward():  # an exception ended that pass, so that autograd did not call _finish
            self._running = False
            self._drop_gradients()
            self._end_pass()
        if not in_backward() and (is_model or not self._in_forward):
            self._follow_user()
        self._in_forward |= is_model
        for flat in self._flats_of[unit.name]:
            flat.finish_gather()

    def _follow_user(self) -> None:
        """Compute with what was written, frozen or unfrozen since the last pass."""
        for flat in self.flats:
            flat.follow_user()
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{name} was frozen at shard(), so no rank trains it: shard it unfrozen, then call requires_grad_(False), "
                    "which requires_grad_(True) undoes"
                )
        if torch.is_grad_enabled() and any(part._modules != before for part, before in self._children.items()):
            ours = {one for flat in self.flats for one in flat.held}
            for name, parameter in self.module.named_parameters():
                if parameter.requires_grad and parameter not in ours:
                    raise RuntimeError(
                        f"{name} is of a module that came after shard(), so its gradient is not averaged: build the whole model "
                        "before, or call requires_grad_(False) if it is not to be trained"
                    )
            self._remember_modules()
        self._trained = [flat for flat in self.flats if flat.trained]
        if self._stale or any(flat.outdated for flat in self.flats):
            self._gather_all()

    def _remember_modules(self) -> None:
        """Remember the submodules, to notice those that come later."""
        self._children = {part: dict(part._modules) for part in self.module.modules()}

    def _end_forward(self, *_: object) -> None:
        """The model has run, or failed."""
        self._in_forward = False
        if self.stage < 3 and not in_backward():
            for flat in self.flats:
                flat.end_forward()

    def _after_forward(self, unit: Unit, module: nn.Module, inputs: object, kwargs: object, output: object) -> None:
        """A unit has run."""

    # In and after a backward pass: the gradients

    def _ready(self, unit: Unit, flat: FlatParameters, index: int, _: Tensor) -> None:
        """Autograd has put the gradient of a parameter into ``.grad``."""
        self._begin_backward()
        flat.add_gradient(index, average=flat not in self._local)

    def _begin_backward(self) -> None:
        if not self._running:
            self._running = True
            for flat in self.flats:
                flat.bump_versions()
            Variable._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def _finish(self) -> None:
        """Backward is over: average what was not averaged yet."""
        self._running = False
        try:
            if self._reduced:
                self._reduce()
                self._stale = True  # the optimizer is going to change the shards
        finally:
            self._end_pass()

    def _end_pass(self) -> None:
        for flat in self.flats:
            flat.end_pass()

    @property
    def _reduced(self) -> list[FlatParameters]:
        """What this backward pass averages."""
        return [flat for flat in self._trained if flat not in self._local]

    def _reduce(self) -> None:
        for flat in self._reduced:
            flat.start_reduce()
        for flat in self._reduced:
            flat.finish_reduce()
        self._exchange_flags()

    def _exchange_flags(self) -> None:
        """Tell all ranks what they must know of each other's gradients, in one small all-reduce.

        - If any shard is not finite, nans are put into all, and empty ones become :class:`ddp.sharded.flat.NotFinite`. So a
          GradScaler comes to the same decision on every rank, and so does code that looks at shards, unless they are empty.
        - A parameter that no rank has used gets no gradient, as in DDP.
        - At stage 3, all must have gathered the same units in the same order.

        :raises RuntimeError: on every rank, if they have not
        """
        # A sum is not finite if one of its terms is not. (A norm would overflow: it squares, and 1e20 squared is inf.)
        flats = self._reduced
        shards = [flat.grad_shard for flat in flats]
        real = [torch.view_as_real(shard) if shard.is_complex() else shard for shard in shards]
        total = torch.stack([shard.sum(dtype=torch.float32) for shard in real]).sum()
        not_finite = torch.where(total.isfinite(), 0.0, 1.0).view(1)
        used = torch.cat([flat.used() for flat in flats]).float()
        digits = self._digits_of_gathers()
        squares = [digit * digit for digit in digits]
        message = torch.cat([not_finite, used, torch.tensor([*digits, *squares]).to(used)])
        self._collectives[1].run(message)
        not_finite, used, sums = message.split([1, len(used), 2 * len(digits)])
        self._finite = not not_finite
        for flat, users in zip(flats, used.split([len(flat.sharded) for flat in flats]), strict=True):
            flat.finalize(not_finite, users)
        # The mean of squares is the square of the mean only if all are the same.
        size = self.process_group.size()
        if sums.tolist() != [size * value for value in (*digits, *squares)]:
            raise RuntimeError(
                "the ranks have run different units, or in another order, so each was given parameters of others: at stage 3 "
                "all ranks must run the same units. Put those that they choose between into one unit"
            )

    def _digits_of_gathers(self) -> list[int]:
        """A checksum of what was gathered since the last reduction, in digits below 64, whose squares a float can add up exactly
        over 4,000 ranks; none at stages 1 and 2."""
        return []


def _cast(dtype: torch.dtype | None, _: nn.Module, inputs: Any, kwargs: Any) -> Any:
    """The inputs of a unit, those of floating point in the dtype in which it computes."""
    return tree_map_only(Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, (inputs, kwargs))
