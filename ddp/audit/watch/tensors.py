"""Few numbers that stand for a tensor: a checksum tells whether two are equal, and a probe is linear, so it can be averaged.

Parameters are known by their number: the order in which this process met them, which is the same on all ranks of a right script.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .events import emit

_ELEMENTS, _WEIGHTINGS = 256, 2
MOST_ROWS = 4096  # of a batch
_weightings = torch.linspace(0.0, 40.0, _ELEMENTS * _WEIGHTINGS, dtype=torch.float64).view(_WEIGHTINGS, -1)
_weightings = _weightings.sin() + 1.5  # no random numbers: those of the script must not change

parameters: dict[int, weakref.ref[Tensor]] = {}  # by number
_numbers: dict[int, int] = {}  # by id
_places: dict[torch.Size, tuple[Tensor, ...]] = {}  # of the elements that a probe takes from a tensor of this shape


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return getattr(tensor, "_local_tensor", tensor)


def is_shard(parameter: Tensor) -> bool:
    """Whether a parameter is this rank's part of a larger one: a DTensor, or a flat parameter of FSDP that is divided."""
    whole = getattr(parameter, "_unpadded_unsharded_size", parameter.shape)
    return hasattr(parameter, "_local_tensor") or whole.numel() != parameter.numel()


def number_of(parameter: Tensor) -> int | None:
    number = _numbers.get(id(parameter))
    return number if number is not None and parameters[number]() is parameter else None


def register(found: Iterable[tuple[str, Tensor]]) -> list[int]:
    """Give new parameters their numbers.

    :returns: the numbers of all
    """
    numbers, named = [], {}
    for name, parameter in found:
        number = number_of(parameter)
        if number is None:
            number = _numbers[id(parameter)] = len(parameters)
            parameters[number] = weakref.ref(parameter)
            named[number] = name or f"parameter {number} of shape {tuple(parameter.shape)}"
        elif name:
            named[number] = name
        numbers.append(number)
    if named:
        emit("names", names=named)
    return numbers


def alive() -> dict[int, Tensor]:
    return {number: parameter for number, ref in parameters.items() if (parameter := ref()) is not None}


def checksum(tensor: Tensor) -> int:
    """Of the elements' bytes, wherever the tensor lies and in whichever layout."""
    tensor = local(tensor.detach())
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return zlib.crc32(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def probe(tensor: Tensor) -> Tensor:
    """Float64 ``[3]``: two weighted sums of up to 256 elements, spread over the tensor, and these elements' norm."""
    tensor = local(tensor.detach())
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if not tensor.numel():
        return torch.zeros(_WEIGHTINGS + 1, dtype=torch.float64)
    if tensor.shape not in _places:
        spread = torch.linspace(0, tensor.numel() - 1, _ELEMENTS, dtype=torch.float64).long()
        _places[tensor.shape] = torch.unravel_index(spread, tensor.shape)
    elements = tensor[_places[tensor.shape]] if tensor.dim() else tensor.expand(_ELEMENTS)
    elements = (elements.abs() if elements.is_complex() else elements).double().cpu()
    return torch.cat([_weightings @ elements, elements.norm()[None]])


def gradient_probes() -> dict[int, list[float]]:
    """Of all gradients that there are."""
    return as_lists({n: probe(p.grad) for n, p in alive().items() if p.grad is not None})


def as_lists(probes: dict[int, Tensor]) -> dict[int, list[float]]:
    return dict(zip(probes, torch.stack(list(probes.values())).tolist(), strict=True)) if probes else {}


def find_tensors(value: Any, depth: int = 6) -> list[Tensor]:
    """The tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    if depth == 0:
        return []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in find_tensors(one, depth - 1)]
    return []


def rows(batch: Any) -> list[int]:
    """A checksum of each sample: of each row of the first tensor."""
    first = next((tensor for tensor in find_tensors(batch) if tensor.dim()), None)
    return [] if first is None else [checksum(row) for row in first[:MOST_ROWS]]
