"""The parameters of a unit in one flat tensor: *whole* to compute with, and this rank's *shard* to optimize.

A *shard parameter* is this rank's part of one parameter, 1-d, maybe empty. The optimizer gets it in the parameter's place.
Optimizers that treat each element by itself (SGD, Adam, AdamW, ...) take the same steps on shard parameters as on whole ones.
Those that look at a whole parameter (Muon, Shampoo, Adafactor, LAMB) do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.all_reduce.base import Pending
from ddp.all_reduce.sharded import ShardedAllReduce
from ddp.sharded.layout import FlatLayout

Owner = tuple[nn.Module, str]  # a module, and the name of a parameter in it


class FlatParameters(FlatLayout):
    """Parameters of one dtype and device, to be trained. A collective.

    - ``whole``: all elements, flat ``[numel]``.
    - ``shard``: this rank's part of them, flat ``[shard_numel]``.
    - ``whole_parameters``, ``shard_parameters``: ``nn.Parameter``s viewing ``whole`` and ``shard``.
    - ``gradient``: the flat gradient of ``whole``, ``[numel]``; None while there is none.
    - ``shard_in_whole``: True if ``shard`` views ``whole``, False if it has memory of its own.

    :param owners: for each parameter by name, the modules that hold it: several if it is tied
    :param group: the ranks that share it; rank 0's values are sent to all
    :param collectives: gathers parameters, and reduces gradients
    :param compute: the dtype of gather, forward and backward only, not of shards, gradients and optimizer state; None is the
        parameters' own
    :param stage: 1 keeps parameters and gradients whole; 2 the parameters only; 3 neither
    """

    whole_class: type[nn.Parameter] = nn.Parameter
    shard_class: type[nn.Parameter] = nn.Parameter

    def __init__(
        self,
        owners: Mapping[str, Sequence[Owner]],
        group: dist.ProcessGroup,
        collectives: tuple[ShardedAllReduce, ShardedAllReduce],
        compute: torch.dtype | None,
        stage: int,
    ) -> None:
        self.owners = dict(owners)
        self._gather, self._reduce = collectives
        self._size, self._stage = group.size(), stage
        originals = [module.get_parameter(name) for module, name in (holders[0] for holders in owners.values())]
        first = originals[0]
        self.dtype, self.device = first.dtype, first.device
        compute = compute or self.dtype
        # Meta tensors have shapes and strides only: the originals' memory is freed when the modules hold the new parameters.
        like = [torch.empty_like(original, device="meta") for original in originals]
        super().__init__(like, group.rank(), group.size(), compute.itemsize, self.dtype.itemsize)

        values = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        for view, original in zip(self.views(values), originals, strict=True):
            view.copy_(original.detach())
        dist.broadcast(values, group=group, group_src=0)
        self.whole = values.to(compute)
        # .to() returns ``values`` itself if the dtype is the same: then the shard can be a view of it.
        self.shard_in_whole = stage < 3 and self.whole is values
        self.shard = self.own(values) if self.shard_in_whole else self.own(values).clone()
        self.whole_parameters = [parameter_in(view, self.whole_class) for view in self.views(self.whole)]
        self.shard_parameters = [parameter_in(part, self.shard_class) for part in self.parts(self.shard)]
        self.held: Sequence[nn.Parameter] = ()  # the list that the modules hold now
        self.install(self.whole_parameters)
        self.is_whole = True  # ``whole`` has memory; a gather may still be filling it
        self._gathering: Pending | None = None

        self.gradient: Tensor | None = None
        self._gradient_views: list[Tensor] = []
        if stage == 1:  # kept at stage 1: allocated where reduce-scatter works in place
            self.gradient = self._reduce.allocate(self.numel, self.dtype, self.device)
            self._gradient_views = self.views(self.gradient)
        self._accumulated: set[int] = set()  # indices of parameters whose gradient is in ``gradient``
        self._came_in_this_pass: set[int] = set()  # indices of those from the running backward pass
        self._reducing: Pending | None = None

    def install(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let the modules hold these parameters."""
        if parameters is not self.held:
            self.held = parameters
            for owners, parameter in zip(self.owners.values(), parameters, strict=True):
                for module, name in owners:
                    setattr(module, name, parameter)

    # Parameters: gathered from the shards, and freed

    @property
    def outdated(self) -> bool:
        """Whether the parameters must be gathered before they are used. (protected/flat.py adds: or a shard was written to.)"""
        return not self.is_whole

    def start_gather(self) -> None:
        """Begin to gather the whole parameters; :meth:`finish_gather` waits for them."""
        if not self.is_whole:
            self.whole.untyped_storage().resize_(self.whole.nbytes)  # gives back the memory that free() took
            self.is_whole = True
        if not self.shard_in_whole:
            self.own(self.whole).copy_(self.shard)
        if self.shard_numel:
            self._gathering = self._gather.start_all_gather(self.whole)

    def finish_gather(self) -> None:
        """Wait until the parameters are whole, and let the modules have them."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        self.install(self.whole_parameters)

    def free(self) -> None:
        """Free the whole parameters. Until the next gather the modules hold shards: computing then raises, instead of reading freed
        memory.

        Only the memory goes. The tensors stay, with all that autograd has saved of them, and are right again when
        :meth:`start_gather` has brought the memory back.
        """
        if self.is_whole:
            self.finish_gather()
            self.install(self.shard_parameters)
            self.whole.untyped_storage().resize_(0)
            self.is_whole = False

    # Gradients: collected, averaged over the ranks, and freed

    def add_gradient(self, index: int) -> bool:
        """Move the gradient of parameter ``index`` from ``.grad`` into the flat gradient.

        :returns: whether all gradients of this backward pass have come
        """
        parameter = self.whole_parameters[index]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if not self._accumulated:
            self._begin_gradient()
        view, gradient = self._gradient_views[index], gradient.detach()
        scale = 1 / self._size  # divided now, so the sum over ranks is the average
        if index in self._accumulated:  # by an earlier micro-step
            view.add_(gradient, alpha=scale)
        else:
            torch.mul(gradient.to(view.dtype), scale, out=view)
        self._accumulated.add(index)
        self._came_in_this_pass.add(index)
        return len(self._came_in_this_pass) == len(self.whole_parameters)

    def _begin_gradient(self) -> None:
        if self.gradient is None:
            self.gradient = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            for begin, end in self.gaps:
                self.gradient[begin:end] = 0
            self._gradient_views = self.views(self.gradient)
        else:  # stage 1: one buffer is reused, and .grad may view it: move old gradients out
            for parameter in self.shard_parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()

    @torch.no_grad()
    def start_reduce(self) -> None:
        """Begin to average the gradients; parameters that have none on this rank contribute zeros."""
        if not self._accumulated:  # no gradient on this rank: begin one, which the loop below fills with zeros
            self._begin_gradient()
        for index, view in enumerate(self._gradient_views):
            if index not in self._accumulated:
                view.zero_()
        self._accumulated.clear()
        assert self.gradient is not None
        if self.shard_numel:
            self._reducing = self._reduce.start_reduce_scatter(self.gradient)

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Wait for the averages, and add this rank's shard of them to the gradients of the shard parameters."""
        assert self.gradient is not None
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None
        averages = self.own(self.gradient)
        if self._stage > 1:  # drop_gradient() below frees the whole gradient
            averages = averages.clone()
        for parameter, average in zip(self.shard_parameters, self.parts(averages), strict=True):
            self.accumulate(parameter, average)
        self.drop_gradient()

    def accumulate(self, parameter: nn.Parameter, average: Tensor) -> None:
        """Make an average the gradient of a shard parameter, or add the gradient that it has."""
        if parameter.grad is not None:
            average.add_(parameter.grad)
        parameter.grad = average

    def drop_gradient(self) -> None:
        """Drop unreduced gradients; from stage 2 on free them."""
        self._accumulated.clear()
        if self._stage > 1:
            self.gradient, self._gradient_views = None, []

    def end_pass(self) -> None:
        """The backward pass is over, or an exception ended it."""
        self._came_in_this_pass.clear()


def parameter_in(memory: Tensor, kind: type[nn.Parameter]) -> nn.Parameter:
    """A parameter in this memory. Set through ``.data``: it gets its own version counter, so autograd does not see writes through
    other views."""
    parameter = kind(memory.new_empty(0))
    parameter.data = memory
    return parameter
