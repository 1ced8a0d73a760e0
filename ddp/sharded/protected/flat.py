"""The parameters of a unit that users may read and write between passes. Some may be unused, or have gradients that are not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ddp.sharded.flat import FlatParameters, Owner, parameter_in
from ddp.sharded.protected.parameters import DirectGradientHook, WatchedParameter, WholeParameter, mark_replaced, writes


class ProtectedFlat(FlatParameters):
    """See :class:`ddp.sharded.flat.FlatParameters` for the parameters."""

    whole_class, shard_class = WholeParameter, WatchedParameter

    def __init__(self, owners: Mapping[str, Sequence[Owner]], *arguments: Any) -> None:
        originals = [module.get_parameter(name) for module, name in (holders[0] for holders in owners.values())]
        super().__init__(owners, *arguments)
        for name, original, shard in zip(owners, originals, self.shard_parameters, strict=True):
            vars(shard).update(vars(original))  # the user's own attributes, such as no_decay
            mark_replaced(original, name)
            DirectGradientHook(shard)
        # All parameters that users may hold, and the tensor in whose memory they must stay.
        self.reachable = [(self.whole_parameters, self.whole), (self.shard_parameters, self.shard)]
        self._shard_writes = writes(self.shard_parameters)  # counted at the last gather
        self._whole_writes = writes(self.whole_parameters)  # counted when last looked at
        # Which parameters had a gradient in the last reduction: on this rank; after finalize(), on any rank.
        self.used: list[bool] = []
        self._had_gradient: list[bool] = []  # which shard parameters had one before that reduction

    # Writes between passes, and in forward

    @property
    def written(self) -> bool:
        """Whether the shards have been written to since they were gathered."""
        return writes(self.shard_parameters) != self._shard_writes

    @property
    def outdated(self) -> bool:
        """Whether the parameters must be gathered before they are used."""
        return super().outdated or self.written

    @torch.no_grad()
    def keep_writes(self) -> None:
        """Copy writes to the whole parameters (a mask, say) into a shard with memory of its own. But if the shard was written to since
        the gather, that counts instead."""
        if self.is_whole and writes(self.whole_parameters) != self._whole_writes:
            self._whole_writes = writes(self.whole_parameters)
            if not (self.shard_in_whole or self.written):
                own = self.own(self.whole)
                same = own == self.shard.to(own.dtype)  # not written to: keep the shard, which has more digits
                self.shard.copy_(torch.where(same, self.shard, own.to(self.dtype)))

    def bump_versions(self) -> None:
        """Bump autograd's version of each whole parameter whose shard was written to since it was gathered. A backward pass that
        needs it as it was in the forward pass then ends in autograd's error, as in one process."""
        self.keep_writes()
        changed = zip(self.whole_parameters, writes(self.shard_parameters), self._shard_writes, strict=True)
        increment_version([whole for whole, now, before in changed if now != before])
        self._whole_writes = writes(self.whole_parameters)

    def start_gather(self) -> None:
        """Begin to gather the whole parameters."""
        if self.is_whole:
            self.finish_gather()
        self.bump_versions()
        self._shard_writes = writes(self.shard_parameters)
        super().start_gather()

    def free(self) -> None:
        """Free the whole parameters, but not what was written to them."""
        self.keep_writes()
        super().free()

    # Whole copies

    @torch.no_grad()
    def install_copies(self) -> None:
        """Let the modules hold copies of the parameters, in the dtype in which they are optimized. A collective."""
        if self.is_whole:
            self.finish_gather()
        self.keep_writes()
        values = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        self.own(values).copy_(self.shard)
        if self.shard_numel:
            self._gather.start_all_gather(values).wait()
        copies = [parameter_in(view, WatchedParameter) for view in self.views(values)]
        self.reachable.append((copies, values))
        self.install(copies)

    @torch.no_grad()
    def take_back_copies(self) -> None:
        """Take over what was written to the copies, and let them go."""
        copies, values = self.reachable.pop()
        if any(writes(copies)):
            self.shard.copy_(self.own(values))
            increment_version(self.shard_parameters)
        self.install(self.whole_parameters if self.is_whole else self.shard_parameters)

    # Gradients

    def add_gradient(self, index: int) -> bool:
        """Move a gradient into the flat one.

        :raises RuntimeError: if it is sparse, or came before in this pass
        """
        name, gradient = list(self.owners)[index], self.whole_parameters[index].grad
        if gradient is not None and gradient.is_sparse:
            raise RuntimeError(f"the gradient of {name} is sparse: build its embedding with sparse=False")
        if index in self._came_in_this_pass:
            raise RuntimeError(
                f"the gradient of {name} became ready twice in one backward pass: do several checkpoints use it? checkpoint with "
                "use_reentrant=False"
            )
        return super().add_gradient(index)

    def start_reduce(self) -> None:
        """Begin to average the gradients, and remember which there are."""
        self.used = [index in self._accumulated for index in range(len(self.owners))]
        super().start_reduce()

    def finish_reduce(self) -> None:
        """Wait for the averages, and remember which gradients users had put into the shard parameters before."""
        self._had_gradient = [parameter.grad is not None for parameter in self.shard_parameters]
        super().finish_reduce()

    def accumulate(self, parameter: nn.Parameter, average: Tensor) -> None:
        """Let the user's hooks on the gradient change the average first.

        :raises RuntimeError: if autograd has run them in this pass already
        """
        # HACK: no public call runs the hooks of ``register_hook``. If torch renames them, this is an AttributeError.
        hooks = list((parameter._backward_hooks or {}).values())
        if DirectGradientHook.of(parameter).fired and (hooks or _after_accumulation(parameter)):
            raise RuntimeError(
                "a hook on a shard's gradient would run twice: on that of a penalty on parameters(), and on the average of the loss's. "
                "Leave the hook out, and change .grad after backward"
            )
        for hook in hooks:
            replaced = hook(average)
            average = average if replaced is None else replaced
        super().accumulate(parameter, average)

    def finalize(self, used: Sequence[bool], finite: bool) -> None:
        """Drop the gradients of parameters that no rank has used. If some rank's gradients are not finite, put a nan into each.

        :param used: for each parameter, whether any rank has used it
        """
        self.used = list(used)
        for parameter, was_used, had in zip(self.shard_parameters, used, self._had_gradient, strict=True):
            if not (was_used or had):
                parameter.grad = None
            elif not finite and parameter.grad is not None:
                parameter.grad[:1] = torch.nan

    def run_hooks(self) -> None:
        """Run what users registered by ``register_post_accumulate_grad_hook``: an optimizer's step, perhaps."""
        for parameter, used in zip(self.shard_parameters, self.used, strict=True):
            for hook in _after_accumulation(parameter) if used else ():
                hook(parameter)

    def end_pass(self) -> None:
        """The backward pass is over, or an exception ended it."""
        super().end_pass()
        for parameter in self.shard_parameters:
            DirectGradientHook.of(parameter).fired = False


def _after_accumulation(parameter: nn.Parameter) -> list[Any]:
    """The user's hooks of ``register_post_accumulate_grad_hook``."""
    # HACK: as in ProtectedFlat.accumulate().
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    return [hook for hook in hooks if not isinstance(hook, DirectGradientHook)]
