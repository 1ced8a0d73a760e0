"""Parameters laid end to end in one flat tensor, of which every rank owns an equal slice.

    flat    |  w1       |  b1  | w2        | b2 | 0 0 |    the last slice is filled up with zeros
    slices  |   rank 0     |   rank 1     |  rank 2   |    a slice may begin and end inside a parameter

One collective gathers or reduces all of it, and all ranks send and receive equally much. Each parameter begins at a multiple of
64 bytes, as torch allocates them: matrix products of others differ in the last bit.

What a parameter has in this rank's slice is its *piece*: a 1-d parameter, perhaps empty, which the optimizer gets in its
place. Optimizers that treat each element by itself (SGD, Adam, AdamW, ...) take the same steps on pieces as on whole
parameters. Those that look at a whole parameter (Muon, Shampoo, Adafactor, LAMB) do not.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.all_reduce.base import Pending
from ddp.all_reduce.sharded import ShardedAllReduce
from ddp.by_hand.buckets import shaped

Owner = tuple[nn.Module, str]  # a module, and the name of a parameter in it
ALIGNMENT = 64  # bytes


class Precision(NamedTuple):
    """The dtypes of computation and communication. Pieces, their gradients and the optimizer's state keep the parameters' own.

    :param compute: in which parameters are gathered and used; the parameters' own when None
    :param reduce: in which gradients are summed over micro-steps and ranks; that of ``compute`` when None
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None


class FlatParameters:
    """Parameters of one dtype and device: whole ones to compute with, and this rank's pieces to optimize. A collective.

    ``full`` is the flat tensor of all ranks' slices (FSDP: unsharded), ``whole`` the parameters in it. ``shard`` is this rank's slice
    (FSDP: sharded), ``pieces`` the parameters in it. ``gradient`` and ``grad_shard`` are the same of gradients. ``shard_in_full``
    says whether the slice lies in the memory of ``full``, or in its own.

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
        self._rank, self._size, self._stage = group.rank(), group.size(), stage
        originals = [module.get_parameter(name) for (module, name), *_ in owners.values()]
        first = originals[0]
        self.dtype, self.device, self.trained = first.dtype, first.device, first.requires_grad
        # Only shapes and strides are kept: the parameters' memory is freed when their owners hold the new ones.
        self.like = [torch.empty_like(original, device="meta") for original in originals]
        if not self.dtype.is_floating_point:  # a quantized parameter, which is frozen
            precision = Precision()
        self.compute_dtype = precision.compute or self.dtype
        self.reduce_dtype = precision.reduce or self.compute_dtype
        aligned = [_round_up(like.numel(), ALIGNMENT // self.compute_dtype.itemsize) for like in self.like]
        self._begins = list(itertools.accumulate(aligned, initial=0))[:-1]
        self._ends = [begin + like.numel() for begin, like in zip(self._begins, self.like, strict=True)]
        even = _round_up(self._ends[-1], self._size) // self._size
        # torch's fused optimizers round the last elements of a tensor, which fill no vector, in another way. So cut between
        # vectors, if that leaves something for the last rank.
        in_vectors = _round_up(even, ALIGNMENT // self.dtype.itemsize)
        self.shard_numel = in_vectors if in_vectors * (self._size - 1) < self._ends[-1] else even
        following = [*self._begins[1:], self.shard_numel * self._size]
        self._gaps = [(end, begin) for end, begin in zip(self._ends, following, strict=True) if end < begin]
        self._own_bounds = self.bounds(self._rank)

        values = torch.zeros(self.shard_numel * self._size, dtype=self.dtype, device=self.device)
        for view, original in zip(self.views(values), originals, strict=True):
            view.copy_(original.detach())
        dist.broadcast(values, group=group, group_src=0)
        self.full = values if self.compute_dtype == self.dtype else values.to(self.compute_dtype)
        self.shard_in_full = stage < 3 and self.full is values
        self.shard = self.own(values) if self.shard_in_full else self.own(values).clone()
        self.whole = [_parameter(view, self.trained) for view in self.views(self.full)]
        self.pieces = [_parameter(piece, self.trained) for piece in self._pieces_of(self.shard)]
        self._install(self.whole)
        self.gathered = self._installed = True  # whole in memory, or being gathered; and held by the modules
        self._gathering: Pending | None = None

        # Of the step that is computed. ``gradient`` is flat, as long as ``full``; some parameters may not have theirs yet.
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
        self._earlier: Tensor | None = None  # this rank's slice of gradients that were reduced before

    # The layout

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's place in a flat tensor, in the parameter's shape."""
        places = zip(self._begins, self._ends, self.like, strict=True)
        return [shaped(flat[begin:end], like) for begin, end, like in places]

    def own(self, flat: Tensor) -> Tensor:
        """This rank's slice of a flat tensor: ``[shard_numel]``."""
        return flat[self._rank * self.shard_numel :][: self.shard_numel]

    def bounds(self, rank: int) -> list[tuple[int, int]]:
        """Where each parameter begins and ends in a rank's slice; the same twice if it has nothing there."""
        offset = rank * self.shard_numel
        in_slice = [
            [min(max(at - offset, 0), self.shard_numel) for at in at_all] for at_all in (self._begins, self._ends)
        ]
        return list(zip(*in_slice, strict=True))

    def begins(self) -> list[int]:
        """At which of its parameter's elements each piece begins."""
        offset = self._rank * self.shard_numel
        return [min(max(offset, begin), end) - begin for begin, end in zip(self._begins, self._ends, strict=True)]

    def _pieces_of(self, own: Tensor) -> list[Tensor]:
        """What each parameter has in this rank's slice."""
        return [own[begin:end] for begin, end in self._own_bounds]

    def _install(self, parameters: Sequence[nn.Parameter]) -> None:
        for owners, parameter in zip(self.owners.values(), parameters, strict=True):
            for module, name in owners:
                setattr(module, name, parameter)

    # Parameters: gathered from the slices, and freed

    def start_gather(self) -> None:
        """Begin to gather the whole parameters; :meth:`finish_gather` waits for them."""
        if not self.gathered:
            self.full.untyped_storage().resize_(self.full.nbytes)
            self.gathered = True
        elif self._installed:
            # Until they are whole again: code that does not wait gets an error, not old values.
            self._install(self.pieces)
            self._installed = False
        if not self.shard_in_full:
            self.own(self.full).copy_(self.shard)
        if self.shard_numel:
            self._gathering = self._gather.start_all_gather(self.full)

    def finish_gather(self) -> None:
        """Wait until the parameters are whole, and let the modules have them."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        if self.gathered and not self._installed:
            self._install(self.whole)
            self._installed = True

    def free(self) -> None:
        """Free the whole parameters. In between, the modules hold the pieces: to compute with them is an error, not a crash.

        Only the memory goes. The tensors stay, with all that autograd has saved of them, and are right again when
        :meth:`start_gather` has brought the memory back.
        """
        if self.gathered:
            self.finish_gather()
            self._install(self.pieces)
            self._installed = False
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
        name = list(self.owners)[index] if gradient.is_sparse or index in self._ready else ""
        if gradient.is_sparse:
            raise RuntimeError(f"the gradient of {name} is sparse: build its embedding with sparse=False")
        if index in self._ready:
            raise RuntimeError(
                f"the gradient of {name} became ready twice in one backward pass: do several checkpoints use it? checkpoint "
                "with use_reentrant=False"
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
        return len(self._ready) == len(self.whole)

    def _begin_gradient(self) -> None:
        if self.gradient is None:
            self.gradient = torch.empty(self.full.numel(), dtype=self.reduce_dtype, device=self.device)
            for begin, end in self._gaps:
                self.gradient[begin:end] = 0
            self._gradient_views = self.views(self.gradient)
        if self._in_place and any(piece.grad is not None for piece in self.pieces):
            self._drop_missing(self.grad_shard)
            self._earlier = self.grad_shard.clone()

    @property
    def _in_place(self) -> bool:
        """Whether the pieces' gradients are this rank's slice of the whole gradient. The next backward pass overwrites it with local
        gradients; so, if the pieces still have theirs, these are put aside (``_earlier``) and added again."""
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
        self._earlier = None
        if self._stage > 1:
            self.gradient, self._gradient_views = None, []

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Wait for the averages, and add this rank's slice to the gradients of the pieces."""
        assert self.gradient is not None
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None
        averages = self.own(self.gradient)
        if self._in_place:
            self._grad_shard = averages
            if self._earlier is not None:
                self._drop_missing(self._earlier)
                averages.add_(self._earlier)
                self._earlier = None
        elif self._grad_shard is None:
            self._grad_shard = averages.to(self.dtype, copy=True)
        elif all(piece.grad is None for piece in self.pieces):
            self._grad_shard.copy_(averages)
        else:
            self._drop_missing(self._grad_shard)
            self._grad_shard.add_(averages)
        if self._stage > 1:
            self.gradient, self._gradient_views = None, []

    def used(self) -> Tensor:
        """Whether this rank has contributed a gradient to the last reduction, for each parameter: bool ``[n]``."""
        return torch.tensor([index not in self._missing for index in range(len(self.pieces))], device=self.device)

    def finalize(self, not_finite: Tensor, users: Tensor) -> None:
        """Give the pieces their gradients; none to those of parameters that no rank has used.

        :param not_finite: ``[1]``, above 0 if the gradients are not finite on any rank
        :param users: for each parameter, how many ranks have used it
        """
        gradients = self._pieces_of(self.grad_shard)
        # In each piece, since an optimizer may have few of them.
        factor = torch.where(not_finite[0] > 0, torch.nan, 1.0).to(self.dtype)
        torch._foreach_mul_([gradient[:1] for gradient in gradients], factor)
        for index, (piece, gradient) in enumerate(zip(self.pieces, gradients, strict=True)):
            was_used = index not in self._missing or bool(users[index] > 0)
            if piece.grad is None and was_used and piece.requires_grad:  # it may have been frozen since
                piece.grad = gradient

    def _drop_missing(self, grad_shard: Tensor) -> None:
        """``zero_grad`` may have dropped the gradients of some pieces only."""
        for piece, gradient in zip(self.pieces, self._pieces_of(grad_shard), strict=True):
            if piece.grad is None:
                gradient.zero_()

    @property
    def grad_shard(self) -> Tensor:
        """After a backward pass that synchronizes: the gradients of the pieces, ``[shard_numel]``, and zeros."""
        assert self._grad_shard is not None
        return self._grad_shard


def _parameter(memory: Tensor, trained: bool) -> nn.Parameter:
    """A parameter in this memory. It counts its own versions: autograd does not see when other views are written."""
    parameter = nn.Parameter(memory.new_empty(0), requires_grad=trained)
    parameter.data = memory
    return parameter


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
