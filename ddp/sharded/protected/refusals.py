"""Refusals of programs that cannot be right on shards: each is a function, which names the parameter and what to do instead.

A new one goes into :data:`BEFORE_SHARDING`, if the module shows it; into :class:`AsSharded`, which is asked before each pass, if only
what users do later shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from common.models.modules import max_norm_problem
from ddp.sharded.protected.flat import ProtectedFlat


def nothing_to_train(module: nn.Module) -> None:
    """:raises ValueError: if no parameter has elements that are trained"""
    if not any(parameter.requires_grad and parameter.numel() for parameter in module.parameters()):
        raise ValueError(f"{type(module).__name__} has no parameters to train")


def writing_embedding(module: nn.Module) -> None:
    """:raises ValueError: for an embedding that each rank would change in the rows of its own batch"""
    if problem := max_norm_problem(module):
        raise ValueError(problem)


def lazy_parameters(module: nn.Module) -> None:
    """:raises ValueError: for a parameter or buffer that gets its shape in the first forward pass"""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{name} has no shape yet: run a forward pass on one batch before shard()")


def hooks_on_gradients(module: nn.Module) -> None:
    """:raises ValueError: for hooks that would stay on a parameter that is replaced"""
    for name, parameter in module.named_parameters():
        # HACK: torch has no public names for these. If it renames them, this is an AttributeError.
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(f"{name} has hooks on its gradient, which shard() would lose: register them after it")


BEFORE_SHARDING: tuple[Callable[[nn.Module], None], ...] = (
    lazy_parameters,
    nothing_to_train,
    writing_embedding,
    hooks_on_gradients,
)


class AsSharded:
    """The module as it was sharded, to refuse before each pass what came later."""

    def __init__(self, module: nn.Module, flats: Sequence[ProtectedFlat]) -> None:
        self._module, self._flats = module, flats
        self._frozen = {name: one for name, one in module.named_parameters() if not one.requires_grad}
        self._remember_modules()

    def _remember_modules(self) -> None:
        self._children = {part: dict(part._modules) for part in self._module.modules()}

    def changed_parameters(self) -> None:
        """:raises RuntimeError: for a parameter that would not be trained, since another is there now, or it lies elsewhere; for one
        that was frozen or unfrozen"""
        frozen = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        for flat in self._flats:
            # The whole parameters, the shards and, in gathered(), the copies.
            places = [memory.untyped_storage().data_ptr() for _, memory in flat.reachable]
            for index, (name, owners) in enumerate(flat.owners.items()):
                same = [parameters[index] for parameters, _ in flat.reachable]
                held = all(module._parameters.get(attribute) is flat.held[index] for module, attribute in owners)
                if not held or [one.untyped_storage().data_ptr() for one in same] != places:
                    raise RuntimeError(
                        f"{name} was replaced or moved after shard() (by .to(), .half(), `.data = ...`, a parametrization?), and "
                        "would not be trained any more: do that before shard(), and write values in place"
                    )
                if not all(one.requires_grad for one in same):
                    frozen.append(name)
        if frozen:
            raise RuntimeError(
                f"{frozen[0]} was frozen or unfrozen after shard(), which shards do not follow: do it before"
            )

    def later_modules(self) -> None:
        """:raises RuntimeError: for a parameter to train in a module that came after ``shard()``"""
        if torch.is_grad_enabled() and any(part._modules != before for part, before in self._children.items()):
            in_shards = {one for flat in self._flats for one in flat.held}
            for name, parameter in self._module.named_parameters():
                if parameter.requires_grad and parameter not in in_shards:
                    raise RuntimeError(
                        f"{name} is of a module that came after shard(), so its gradient is not averaged: build the whole model "
                        "before, or call requires_grad_(False) if it is not to be trained"
                    )
            self._remember_modules()


# Optimizers that look at a whole parameter, or at all of them, by name: torch's own and those that people use beside them.
NOT_ELEMENTWISE = {
    **dict.fromkeys(("LBFGS", "Prodigy", "DAdaptAdam", "DAdaptSGD", "DAdaptLion"), "dot products of all parameters"),
    **dict.fromkeys(("Adafactor", "CAME"), "means of a parameter's rows and columns"),
    **dict.fromkeys(("Muon", "Shampoo", "DistributedShampoo", "SOAP"), "a parameter as a matrix"),
    **dict.fromkeys(("Lamb", "LAMB", "FusedLAMB", "Lars", "LARS", "LarsSGD"), "the norm of a parameter"),
}


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """:raises RuntimeError: for an optimizer whose step needs more of a parameter than each element by itself"""
    for kind in type(optimizer).__mro__:
        if needs := NOT_ELEMENTWISE.get(kind.__name__):
            raise RuntimeError(
                f"{kind.__name__} needs {needs}, of which a rank has only its shard: take an optimizer that treats each element by "
                "itself (SGD, Adam, AdamW, ...), or train replicas"
            )


def blind_optimizer(shards: Iterable[nn.Parameter]) -> None:
    """:raises RuntimeError: for a step after an inf or nan, of an optimizer that has no element on this rank to see it by"""
    if not any(shard.numel() for shard in shards):
        raise RuntimeError(
            "the gradients are not finite on some rank, but all shards of this optimizer are empty on this one. Its GradScaler would "
            "step here and skip elsewhere: give all parameters to one optimizer, or use fewer ranks"
        )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All parameters that an optimizer has."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
