"""The memory of a sharded model's tensors on one rank, read from their storages.

Counted are whole parameters and gradients of each unit, slices of both, and the optimizer's state. Not counted are
activations, what a step of the optimizer needs for itself, and what the collectives copy (gloo's reduce-scatter copies what
it sends).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp.sharded.flat import FlatParameters


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank from a moment on, until the next.

    At stages 1 and 2 the slice of the parameters lies in the whole ones, and at stage 1 the slice of the gradients in the whole
    ones: these bytes are counted once, as whole.

    :param moment: seconds
    :param state: of the optimizer
    :param parameter_slices: this rank's parameters
    :param gradient_slices: their gradients
    :param parameters: of each unit, whole
    :param gradients: of each unit, whole
    """

    moment: float
    state: int
    parameter_slices: int
    gradient_slices: int
    parameters: dict[str, int]
    gradients: dict[str, int]

    @property
    def total(self) -> int:
        """All bytes."""
        slices = self.state + self.parameter_slices + self.gradient_slices
        return slices + sum(self.parameters.values()) + sum(self.gradients.values())


def count(unit_of: Mapping[FlatParameters, str], state: int, moment: float) -> Memory:
    """What there is now.

    :param unit_of: the name of the unit of all flat parameters
    :param state: bytes of the optimizer's state, which changes in its first step only
    :param moment: seconds
    """
    parameters, gradients = dict.fromkeys(unit_of.values(), 0), dict.fromkeys(unit_of.values(), 0)
    parameter_slices = gradient_slices = 0
    for flat, unit in unit_of.items():
        parameters[unit] += bytes_of([flat.full])
        parameter_slices += bytes_of([flat.full, flat.shard]) - bytes_of([flat.full])
        whole = [] if flat.gradient is None else [flat.gradient]
        whole += [parameter.grad for parameter in flat.whole if parameter.grad is not None]  # on their way into it
        gradients[unit] += bytes_of(whole)
        own = [] if flat._grad_shard is None else [flat._grad_shard]
        gradient_slices += bytes_of([*whole, *own]) - bytes_of(whole)
    return Memory(moment, state, parameter_slices, gradient_slices, parameters, gradients)


def state_of(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state."""
    values = (value for entry in optimizer.state.values() for value in entry.values())
    return bytes_of(value for value in values if isinstance(value, Tensor))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of the tensors' storages, each counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
