"""ZeRO stage 1: all ranks compute with all parameters, and each optimizes only its own shard of them.

    model = shard(network, stage=1)
    optimizer = torch.optim.AdamW(model.parameters())  # of this rank's shards: on p ranks, 1/p of DDP's state
    model(inputs).sum().backward()                     # the gradients of the shards are now averages over the ranks
    optimizer.step()                                   # of this rank's shards; then the new parameters are gathered

In DDP every rank takes the same step, p times the same work and p times the same optimizer state. Here a step is

    forward, backward  ->  reduce-scatter of gradients  ->  step of one shard  ->  all-gather of parameters

The last three are ``_reduce``, called when autograd is done; the optimizer's own step; and ``_after_step``, which torch's
optimizers call. (The gather could be delayed into the next forward; readers in between would see old weights.)

The two collectives together are DDP's all-reduce, with the step in between. They send as many bytes, and two ranks get the same
weights as with DDP, to the last bit (without clipping, whose norm is summed in another order).
(Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020, arXiv 1910.02054, section 5.1.)

These classes assume that only ``optimizer.step()`` changes the model between passes. ``shard()`` returns their subclasses in
ddp/sharded/protected/, for programs that also freeze, write to or copy the model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp.all_reduce.sharded import ShardedAllReduce
from ddp.by_hand.replicas import broadcast
from ddp.sharded.flat import FlatParameters
from ddp.sharded.units import Unit, by_dtype, divide


class ZeRO1(nn.Module):
    """Shards the optimizer's state of ``module`` over the ranks. All ranks construct it together.

    It replaces the module's parameters, so build the optimizer from this wrapper's :meth:`parameters`: this rank's shards, under the
    original names. Frozen parameters and buffers stay whole on every rank.

    :param module: the same on every rank; values may differ, since rank 0's are broadcast
    :param units: the submodules whose parameters are gathered as one, at stage 3; see :func:`ddp.sharded.units.divide`
    :param collectives: two, since stage 3 uses both at once: the first gathers parameters, the second reduces gradients
    :param compute: the dtype of gathered parameters, and of forward and backward; None takes that of the shards
    :raises ValueError: for units that :func:`ddp.sharded.units.divide` refuses
    """

    stage = 1
    flat_class: type[FlatParameters] = FlatParameters

    def __init__(
        self,
        module: nn.Module,
        units: Iterable[nn.Module] | None,
        collectives: tuple[ShardedAllReduce, ShardedAllReduce],
        compute: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert dist.group.WORLD is not None
        self.module, self.process_group = module, dist.group.WORLD
        self._collectives, self._compute = collectives, compute
        self._names = list(dict(module.named_parameters()))
        self._running = False  # True during a backward pass; protected/ sets it back if an exception ends the pass
        self._synchronizes = True  # False within no_sync
        # _after_step runs after every optimizer's step in this process.
        self._hooks: list[Any] = [register_optimizer_step_post_hook(self._after_step)]
        # One per unit and dtype. Each has the parameters as one flat tensor, this rank's shard of it, and the gradients.
        self.flats: list[FlatParameters] = []
        self._flats_of: dict[str, list[FlatParameters]] = {}  # by the unit's name: used at stage 3
        self.units = divide(module, units)
        for unit in self.units:
            self._add(unit)
        # self.named_parameters(), below, gives this rank's shards alone; the module's gives all parameters, under the same names.
        in_shards = dict(self.named_parameters())
        frozen = [parameter for name, parameter in module.named_parameters() if name not in in_shards]
        broadcast([*frozen, *module.buffers()], 0, self.process_group)  # FlatParameters has broadcast the others

    def _add(self, unit: Unit) -> None:
        """Cut a unit's parameters into shards."""
        # ``owners`` are the unit's trained parameters of one dtype: by name, the modules that hold each (several if it is tied).
        self._flats_of[unit.name] = [
            self.flat_class(owners, self.process_group, self._collectives, self._compute, self.stage)
            for owners in by_dtype(unit)
        ]
        self.flats += self._flats_of[unit.name]
        for flat in self._flats_of[unit.name]:
            # The whole parameters compute, and get gradients. The shards are what is optimized.
            for index, parameter in enumerate(flat.whole_parameters):
                ready = functools.partial(self._ready, flat, index)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(ready))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """``module``'s forward."""
        return self.module(*inputs, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards, under the parameters' names and in their order. (``parameters()`` calls this.)"""
        shards = {
            name: one for flat in self.flats for name, one in zip(flat.owners, flat.shard_parameters, strict=True)
        }
        for name in self._names:
            if name in shards:
                yield f"{prefix}.{name}" if prefix else name, shards[name]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this block, gradients add up unreduced until a backward pass outside."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    def close(self) -> None:
        """Free the threads and connections of the collectives; the model cannot be trained further."""
        for collectives in self._collectives:
            collectives.close()
        for hook in self._hooks:  # hooks keep this model alive; Python's GC cannot see the cycle
            hook.remove()

    # In and after a backward pass: the gradients

    def _ready(self, flat: FlatParameters, index: int, _: Tensor) -> None:
        """Autograd has put the gradient of a parameter into ``.grad``."""
        self._begin_backward()
        flat.add_gradient(index)  # moves it into the flat gradient

    def _begin_backward(self) -> None:
        """At the first gradient of a pass, have autograd call ``_finish`` when the pass is over. (Stage 3 calls this earlier.)"""
        if not self._running:
            self._running = True
            # HACK: no public call tells when a backward pass is over. torch's DDP and FSDP use this one, too.
            Variable._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def _finish(self) -> None:
        """Backward is over: average the gradients. (Stages 2 and 3 have begun to.)"""
        self._running = False
        # no_sync is read here, at the end of backward; DDP reads it in forward. A block around both passes works with either.
        if self._synchronizes:
            self._reduce()
        self._end_pass()

    def _reduce(self) -> None:
        for flat in self.flats:
            flat.start_reduce()
        for flat in self.flats:
            flat.finish_reduce()

    def _end_pass(self) -> None:
        """Forget which gradients came in this pass."""
        for flat in self.flats:
            flat.end_pass()

    # After an optimizer's step: the parameters

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """An optimizer has stepped. If it has shards of this model, gather the new parameters. All ranks must step, or the others wait."""
        stepped = {one for group in optimizer.param_groups for one in group["params"]}
        if not stepped.isdisjoint(self.parameters()):
            self._gather_all()

    def _gather_all(self) -> None:
        for flat in self.flats:
            flat.start_gather()
        for flat in self.flats:
            flat.finish_gather()
