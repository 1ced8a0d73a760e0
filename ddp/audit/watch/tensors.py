"""Few numbers that stand for a tensor: a checksum tells whether two are equal, and a probe is linear, so it can be averaged.

Parameters are known by their number: the order in which this process met them, which is the same on all ranks of a right script.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .event_types import Names
from .events import emit

_ELEMENTS, _WEIGHTINGS = 256, 2
MOST_ROWS = 4096  # of a batch
DEPTH = 6  # of nested dicts, lists and tuples
_weightings = torch.linspace(0.0, 40.0, _ELEMENTS * _WEIGHTINGS, dtype=torch.float64).view(_WEIGHTINGS, -1)
_weightings = _weightings.sin() + 1.5  # no random numbers: those of the script must not change

_numbers = WeakTensorKeyDictionary()  # of the parameters
_next_number = itertools.count()
_places: dict[torch.Size, tuple[Tensor, ...]] = {}  # of the elements that a probe takes from a tensor of this shape


def number_of(parameter: Tensor) -> str:
    """A parameter's number, which it gets when it is met first."""
    number = _numbers.get(parameter)
    if number is None:
        number = _numbers[parameter] = str(next(_next_number))
        emit(Names(names={number: f"parameter {number} of shape {tuple(parameter.shape)}"}))
    return str(number)


def known(parameters: Iterable[Tensor]) -> list[str]:
    """The numbers of those that have one."""
    return [str(_numbers[parameter]) for parameter in parameters if parameter in _numbers]


def alive() -> dict[str, Tensor]:
    """The parameters that there are, by number."""
    return {number: parameter for parameter, number in _numbers.items()}


def are_parameters(tensors: Iterable[Tensor]) -> bool:
    """Whether one of them lies in the memory of a parameter."""
    places = set(map(_place, alive().values()))
    return any(_place(tensor) in places for tensor in tensors)


def _place(tensor: Tensor) -> int:
    return _local(tensor).untyped_storage().data_ptr()


def _local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds: of a DTensor, or of a ShardedTensor in a checkpoint of FSDP."""
    if hasattr(tensor, "local_shards"):
        return torch.cat([torch.empty(0), *(shard.tensor.flatten() for shard in tensor.local_shards())])
    return getattr(tensor, "_local_tensor", tensor)


def is_shard(parameter: Tensor) -> bool:
    """Whether a parameter is this rank's part of a larger one: a DTensor, or a flat parameter of FSDP that is divided."""
    whole = getattr(parameter, "_unpadded_unsharded_size", parameter.shape)
    return hasattr(parameter, "_local_tensor") or whole.numel() != parameter.numel()


def dense(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, with all of its elements."""
    tensor = _local(tensor).detach()
    return tensor.to_dense() if tensor.is_sparse else tensor


def checksum(tensor: Tensor, before: int = 0) -> int:
    """Hash of the elements' bytes, wherever the tensor lies and in whichever layout.

    :param before: that of other tensors, which it goes on with
    """
    return zlib.crc32(dense(tensor).cpu().contiguous().view(-1).view(torch.uint8).numpy().data, before)


def probe(tensor: Tensor) -> Tensor:
    """Float64 ``[3]``: two weighted sums of up to 256 elements, spread over the tensor, and these elements' norm."""
    tensor = dense(tensor)
    if not tensor.numel():
        return torch.zeros(_WEIGHTINGS + 1, dtype=torch.float64)
    if tensor.shape not in _places:
        spread = torch.linspace(0, tensor.numel() - 1, _ELEMENTS, dtype=torch.float64).long()
        _places[tensor.shape] = torch.unravel_index(spread, tensor.shape)
    elements = tensor[_places[tensor.shape]] if tensor.dim() else tensor.expand(_ELEMENTS)
    elements = (elements.abs() if elements.is_complex() else elements).double().cpu()
    return torch.cat([_weightings @ elements, elements.norm()[None]])


def walk(value: Any, *path: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """A value and what is below it in nested dicts, lists and tuples, each with the keys that lead to it."""
    yield path, value
    if len(path) < DEPTH:
        items = (
            value.items()
            if isinstance(value, Mapping)
            else enumerate(value)
            if isinstance(value, (list, tuple))
            else ()
        )
        for key, below in items:
            yield from walk(below, *path, key)


def find_tensors(value: Any) -> list[Tensor]:
    """The tensors in nested dicts, lists and tuples."""
    return [below for _, below in walk(value) if isinstance(below, Tensor)]


def rows(batch: Any) -> list[int]:
    """A checksum of each sample: of its row in every tensor that has as many rows as the most."""
    found = [tensor for tensor in find_tensors(batch) if tensor.dim()]
    ((length, _),) = Counter(map(len, found)).most_common(1) or [(0, 0)]
    sums = [0] * min(length, MOST_ROWS)
    for tensor in found:
        if len(tensor) == length:
            sums = [checksum(row, before) for row, before in zip(tensor[:MOST_ROWS], sums, strict=True)]
    return sums
