"""The parameters of a unit in one flat tensor: whole ones to compute with, and this rank's shard to optimize.

A *sharded parameter* is what of a parameter lies in this rank's shard of the flat tensor: a 1-d parameter, perhaps empty, which the
optimizer gets in its place. Optimizers that treat each element by itself (SGD, Adam, AdamW, ...) take the same steps on sharded
parameters as on whole ones. Those that look at a whole parameter (Muon, Shampoo, Adafactor, LAMB) do not.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.all_reduce.base import Pending
from ddp.all_reduce.sharded import ShardedAllReduce
from ddp.sharded.layout import FlatLayout

Owner = tuple[nn.Module, str]  # a module, and the name of a parameter in it


class Precision(NamedTuple):
    """The dtypes of computation and communication. Shards, their gradients and the optimizer's state keep the parameters' own.

    :param compute: in which parameters are gathered and used; the parameters' own when None
    :param reduce: in which gradients are summed over micro-steps and ranks; that of ``compute`` when None
    :param cast_inputs: whether floating-point inputs of a unit are cast to ``compute``
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    cast_inputs: bool = False


class WatchedParameter(nn.Parameter):
    """A parameter whose ``_version`` counts every write: those through ``.data``, which plain ones do not count, and the steps of
    fused optimizers (ddp/sharded/stages.py)."""

    data = property(Tensor.detach, Tensor.data.__set__)  # type: ignore[attr-defined]


def _gradient(parameter: WholeParameter) -> Tensor | None:
    # _apply() converts a module. If it changes something, the next forward pass says so.
    if not in_backward() and sys._getframe(1).f_code.co_name != "_apply":
        raise RuntimeError(
            "the module's own parameters have no gradients after shard(): take parameters(), or zero_grad(), of what it returned"
        )
    return Tensor.grad.__get__(parameter)  # type: ignore[union-attr, no-any-return]


class WholeParameter(nn.Parameter):
    """A parameter to compute with. It has a gradient only while autograd runs: then that is moved to the shards."""

    grad = property(_gradient, Tensor.grad.__set__)  # type: ignore[union-attr]

    def detach(self) -> Tensor:
        """Of the same class, as ``nn.Parameter()`` of this asks for."""
        return super().detach().as_subclass(WholeParameter)


class NotFinite(Tensor):
    """An empty gradient, which tells a ``GradScaler`` that the gradients are not finite."""

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, arguments: Any = (), named: Any = None) -> Any:
        if function is torch._amp_foreach_non_finite_check_and_unscale_:
            arguments[1].fill_(1.0)  # found_inf
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **(named or {}))


class FlatParameters(FlatLayout):
    """Parameters of one dtype and device: whole ones to compute with, and sharded ones to optimize. A collective.

    ``full`` is the flat tensor of all ranks' shards, ``whole`` the parameters in it. ``shard`` is this rank's shard, ``sharded`` the
    parameters in it. ``held`` are those that the modules hold now. ``gradient`` and ``grad_shard`` are flat gradients, whole and
    this rank's. ``shard_in_full`` says whether the shard lies in the memory of ``full``, or in its own.

    :param owners: for each parameter by name, the modules that hold it: several if it is tied
    :param group: the ranks that share it; rank 0's values are sent to all
    :param collectives: gathers parameters, and reduces gradients
    :param precision: see :class:`Precision`
    :param stage: 1 keeps parameters and gradients whole; 2 the parameters only; 3 neither
    """

    def __init__(
        self,
        owners: Mapping[str, Sequence[Owner]],
        group: dist.ProcessGroup,
        collectives: tuple[ShardedAllReduce, ShardedAllReduce],
        precision: Precision,
        stage: int,
    ) -> None:
        self.owners = dict(owners)
        self._gather, self._reduce = collectives
        self._size, self._stage = group.size(), stage
        originals = [module.get_parameter(name) for (module, name), *_ in owners.values()]
        first = originals[0]
        self.dtype, self.device = first.dtype, first.device
        self._trains = [first.requires_grad] * len(originals)  # it may be frozen later
        # Only shapes and strides are kept: the parameters' memory is freed when their owners hold the new ones.
        like = [torch.empty_like(original, device="meta") for original in originals]
        if not self.dtype.is_floating_point:  # a quantized parameter, which is frozen
            precision = Precision()
        self.compute_dtype = precision.compute or self.dtype
        self.reduce_dtype = precision.reduce or self.compute_dtype
        super().__init__(like, group.rank(), group.size(), self.compute_dtype.itemsize, self.dtype.itemsize)

        values = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        for view, original in zip(self.views(values), originals, strict=True):
            view.copy_(original.detach())
        dist.broadcast(values, group=group, group_src=0)
        self.full = values if self.compute_dtype == self.dtype else values.to(self.compute_dtype)
        self.shard_in_full = stage < 3 and self.full is values
        self.shard = self.own(values) if self.shard_in_full else self.own(values).clone()
        self.whole = [_parameter(WholeParameter, view, self.trained) for view in self.views(self.full)]
        self.sharded = [_parameter(WatchedParameter, part, self.trained) for part in self.parts(self.shard)]
        for name, sharded, original in zip(owners, self.sharded, originals, strict=True):
            if original._backward_hooks or original._post_accumulate_grad_hooks:
                raise ValueError(f"{name} has hooks on its gradient, which shard() would lose: register them after it")
            vars(sharded).update(vars(original))  # the user's own attributes, such as no_decay
        self.outside, self._outside_memory = self.sharded, self.shard  # in `with model.gathered():`, whole copies
        self.install(self.whole)
        self.gathered = True  # whole in memory, or being gathered
        self._gathering: Pending | None = None
        self._gathered_writes = _writes(self.sharded)  # when they were gathered

        # The gradients of the running step. ``gradient`` is flat, as long as ``full``; some parameters may not have theirs yet.
        self.gradient: Tensor | None = None
        self._gradient_views: list[Tensor] = []
        if stage == 1 and self.trained:  # all will be kept: where the reduction takes place without a copy
            self.gradient = self._reduce.allocate(self.full.numel(), self.reduce_dtype, self.device)
            self._gradient_views = self.views(self.gradient)
        self._filled: set[int] = set()  # indices of parameters whose gradient is in it
        self._ready: set[int] = set()  # indices of those that came in the running backward pass
        self._missing: set[int] = set()  # indices of those that have none on this rank, of the last reduction
        self._reducing: Pending | None = None
        self._grad_shard: Tensor | None = None

    def install(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let the modules hold these parameters."""
        self.held = parameters
        for owners, parameter in zip(self.owners.values(), parameters, strict=True):
            for module, name in owners:
                setattr(module, name, parameter)

    @property
    def trained(self) -> bool:
        """Whether any of the parameters gets a gradient; they may have been frozen since :func:`ddp.sharded.stages.shard`."""
        return any(self._trains)

    # Between passes, users write to parameters, freeze them, replace them

    @property
    def outdated(self) -> bool:
        """Whether the sharded parameters have been written to since they were gathered."""
        return _writes(self.sharded) != self._gathered_writes

    def bump_versions(self) -> None:
        """Bump autograd's version of each whole parameter whose shard was written to since it was gathered. A backward pass that
        needs it as it was in the forward pass then ends in autograd's error, as in one process."""
        writes = zip(self.whole, _writes(self.sharded), self._gathered_writes, strict=True)
        torch.autograd.graph.increment_version([whole for whole, now, before in writes if now != before])

    def follow_user(self) -> None:
        """Freeze and unfreeze the parameters as the user has, whichever of them.

        :raises RuntimeError: for a parameter that was replaced or moved
        """
        places = [memory.untyped_storage()._cdata for memory in (self.full, self.shard, self._outside_memory)]
        for index, (name, owners) in enumerate(self.owners.items()):
            same = self.whole[index], self.sharded[index], self.outside[index]
            held = all(module._parameters.get(attribute) is self.held[index] for module, attribute in owners)
            if not held or [one.untyped_storage()._cdata for one in same] != places:
                raise RuntimeError(
                    f"{name} was replaced or moved after shard() (by .to(), .half(), `.data = ...`, a parametrization?), and would "
                    "not be trained any more: do that before shard(), and write values in place"
                )
            if any(one.requires_grad != self._trains[index] for one in same):
                self._trains[index] = not self._trains[index]
                for one in same:
                    one.requires_grad_(self._trains[index])

    @torch.no_grad()
    def end_forward(self) -> None:
        """A pass is over, in which forward may have written to the whole parameters."""
        self.keep_writes()
        if self.outside is not self.sharded:
            self.install(self.outside)

    @torch.no_grad()
    def keep_writes(self) -> None:
        """Bring what was written to the whole parameters (a mask, say) into a shard with memory of its own. A later write to the shard
        counts instead."""
        if self.gathered and not self.shard_in_full and not self.outdated:
            own = self.own(self.full)
            same = own == self.shard.to(own.dtype)  # then the shard has more digits
            self.shard.copy_(torch.where(same, self.shard, own.to(self.dtype)))

    @torch.no_grad()
    def copy_whole(self) -> None:
        """Let the modules hold a copy of the whole parameters, in the dtype in which they are optimized. A collective."""
        self.finish_gather()
        self.follow_user()
        self.keep_writes()
        values = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        self.own(values).copy_(self.shard)
        if self.shard_numel:
            self._gather.start_all_gather(values).wait()
        if self.gathered:
            self._gathered_writes = _writes(self.sharded)
            self.full.copy_(values)
        views = zip(self.views(values), self._trains, strict=True)
        self.outside, self._outside_memory = [_parameter(WatchedParameter, *view) for view in views], values
        self.install(self.outside)

    @torch.no_grad()
    def end_copy(self) -> None:
        """Take back what was written to the copy, and let it go."""
        self.follow_user()
        if any(_writes(self.outside)):
            self.shard.copy_(self.own(self._outside_memory))
            torch.autograd.graph.increment_version(self.sharded)
        self.outside, self._outside_memory = self.sharded, self.shard
        self.install(self.whole if self.gathered else self.sharded)

    # Parameters: gathered from the shards, and freed

    def start_gather(self) -> None:
        """Begin to gather the whole parameters; :meth:`finish_gather` waits for them."""
        self.finish_gather()
        self.keep_writes()
        self.bump_versions()
        self._gathered_writes = _writes(self.sharded)
        if not self.gathered:
            self.full.untyped_storage().resize_(self.full.nbytes)
            self.gathered = True
        elif self.held is self.whole:
            # Until they are whole again: code that does not wait gets an error, not old values.
            self.install(self.outside)
        if not self.shard_in_full:
            self.own(self.full).copy_(self.shard)
        if self.shard_numel:
            self._gathering = self._gather.start_all_gather(self.full)

    def finish_gather(self) -> None:
        """Wait until the parameters are whole, and let the modules have them."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        if self.gathered and self.held is not self.whole:
            self.install(self.whole)

    def free(self) -> None:
        """Free the whole parameters. In between, the modules hold the sharded parameters: to compute with them is an error, not a crash.

        Only the memory goes. The tensors stay, with all that autograd has saved of them, and are right again when
        :meth:`start_gather` has brought the memory back.
        """
        if self.gathered:
            self.finish_gather()
            self.install(self.outside)
            self.full.untyped_storage().resize_(0)
            self.gathered = False

    # Gradients: collected, reduced over the ranks, and freed

    def add_gradient(self, index: int, average: bool) -> bool:
        """Move the gradient of parameter ``index`` from ``.grad`` into the flat gradient.

        :param average: whether it will be reduced in this backward pass
        :returns: whether all parameters have theirs
        :raises RuntimeError: if it is sparse, or came before in this pass
        """
        parameter = self.whole[index]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if gradient.is_sparse:
            raise RuntimeError(
                f"the gradient of {list(self.owners)[index]} is sparse: build its embedding with sparse=False"
            )
        if index in self._ready:
            raise RuntimeError(
                f"the gradient of {list(self.owners)[index]} became ready twice in one backward pass: do several checkpoints use "
                "it? checkpoint with use_reentrant=False"
            )
        if not self._filled:
            self._begin_gradient()
        view, gradient = self._gradient_views[index], gradient.detach()
        scale = 1 / self._size
        if average and index not in self._filled and view.dtype == gradient.dtype:
            torch.mul(gradient, scale, out=view)
        else:
            (view.add_ if index in self._filled else view.copy_)(gradient)
            if average:
                view.mul_(scale)
        self._filled.add(index)
        self._ready.add(index)
        return len(self._ready) == sum(self._trains)

    def _begin_gradient(self) -> None:
        if self.gradient is None:
            self.gradient = torch.empty(self.full.numel(), dtype=self.reduce_dtype, device=self.device)
            for begin, end in self.gaps:
                self.gradient[begin:end] = 0
            self._gradient_views = self.views(self.gradient)
        if self._in_place:
            for parameter in self.sharded:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()

    @property
    def _in_place(self) -> bool:
        """Whether the sharded parameters' gradients are this rank's shard of the whole gradient.

        The next backward pass overwrites it with local gradients. So, if the sharded parameters still have theirs, these are put
        aside, and added again.
        """
        return self._stage == 1 and self.reduce_dtype == self.dtype

    @torch.no_grad()
    def start_reduce(self) -> None:
        """Begin to average the gradients; parameters that have none on this rank contribute zeros."""
        if not self._filled:
            self._begin_gradient()
        self._missing = set(range(len(self.whole))) - self._filled
        for index, view in enumerate(self._gradient_views):
            if index in self._missing:
                view.zero_()
            elif index not in self._ready:  # from an earlier micro-step
                view.mul_(1 / self._size)
        assert self.gradient is not None
        if self.shard_numel:
            self._reducing = self._reduce.start_reduce_scatter(self.gradient)
        self._filled.clear()

    def end_pass(self) -> None:
        """The backward pass is over, or was abandoned."""
        self._ready.clear()

    def drop_gradient(self) -> None:
        """Forget what was not reduced yet."""
        self._filled.clear()
        if self._stage > 1:
            self.gradient, self._gradient_views = None, []

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Wait for the averages, and add this rank's shard to the gradients of the sharded parameters."""
        assert self.gradient is not None
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None
        averages = self.own(self.gradient)
        if self._in_place:
            self._grad_shard = averages
        elif self._grad_shard is not None and all(parameter.grad is None for parameter in self.sharded):
            self._grad_shard.copy_(averages)
        else:
            self._grad_shard = averages.to(self.dtype, copy=True)
        for parameter, gradient in zip(self.sharded, self.parts(self._grad_shard), strict=True):
            if parameter.grad is not None:  # of earlier passes, of a penalty on the shards, or the user's own
                parameter.grad = gradient.add_(parameter.grad)
        if self._stage > 1:
            self.gradient, self._gradient_views = None, []

    def used(self) -> Tensor:
        """Whether this rank has contributed a gradient to the last reduction, for each parameter: bool ``[n]``."""
        return torch.tensor([index not in self._missing for index in range(len(self.sharded))], device=self.device)

    def finalize(self, not_finite: Tensor, users: Tensor) -> None:
        """Give the sharded parameters their gradients; none to those of parameters that no rank has used.

        :param not_finite: ``[1]``, above 0 if the gradients are not finite on any rank
        :param users: for each parameter, how many ranks have used it
        """
        gradients = self.parts(self.grad_shard)
        # In each of them, since an optimizer may have few of them.
        factor = torch.where(not_finite[0] > 0, torch.nan, 1.0).to(self.dtype)
        torch._foreach_mul_([gradient[:1] for gradient in gradients], factor)
        for index, (parameter, gradient) in enumerate(zip(self.sharded, gradients, strict=True)):
            was_used = index not in self._missing or bool(users[index] > 0)
            if parameter.grad is None and was_used and parameter.requires_grad:  # it may have been frozen since
                parameter.grad = gradient
            if parameter.grad is not None and not parameter.numel():
                parameter.grad = gradient.as_subclass(NotFinite) if not_finite else gradient

    @property
    def grad_shard(self) -> Tensor:
        """After a backward pass that synchronizes: the gradients of the sharded parameters, ``[shard_numel]``, and zeros."""
        assert self._grad_shard is not None
        return self._grad_shard


def in_backward() -> bool:
    """Whether autograd is running: activation checkpointing runs forward within backward."""
    return torch._C._current_graph_task_id() != -1


def _writes(parameters: Sequence[nn.Parameter]) -> list[int]:
    """How often each of them has been written to."""
    return [one._version for one in parameters]


def _parameter(kind: type[nn.Parameter], memory: Tensor, trained: bool) -> nn.Parameter:
    """A parameter in this memory. It counts its own versions: autograd does not see when other views are written."""
    parameter = kind(memory.new_empty(0), requires_grad=trained)
    parameter.data = memory
    return parameter
