"""Tensors in pieces: how the ranks of a sharded job share out a checkpoint, and any other number of ranks reads it.

    rank-0-of-2.pt     | w1 begin 0 .... | b1 begin 0 | w2 begin 0 .. |
    rank-1-of-2.pt                                    | w2 begin 700 ....... | b2 begin 0 |

A *piece* is a run of consecutive elements of a tensor, in the order in which they lie in memory. All layouts in use are made of
such runs: slices of flat parameters (ZeRO), shards along the first dimension (``fully_shard``), and whole tensors (replicas).
So a reader needs to know where each piece begins, and nothing about who wrote it.

Files are mapped, not read: only the elements that a rank takes come into its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp.checkpoint.folder import Damaged, listed_files, load


class Place(NamedTuple):
    """Where a piece lies in its tensor.

    :param begin: of its first element, in memory order
    :param shape: of the whole tensor
    :param order: the tensor's dimensions, from the slowest to the fastest in memory; channels-last is ``(0, 2, 3, 1)``
    """

    begin: int
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of_whole(cls, tensor: Tensor) -> Place:
        """The place of a whole tensor that has no gaps."""
        return cls(0, tuple(tensor.shape), memory_order(tensor))


class Piece(NamedTuple):
    """A piece in memory, or in a mapped file: its values ``[n]``, of any dtype."""

    values: Tensor
    place: Place

    @classmethod
    def of_whole(cls, tensor: Tensor) -> Piece:
        """A whole tensor as one piece. It is copied only if it has gaps."""
        return cls(in_memory_order(tensor, memory_order(tensor)), Place.of_whole(tensor))


Saved = dict[str, list[Piece]]  # the pieces of each tensor, by its name


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions from the slowest to the fastest."""
    return tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def in_memory_order(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """All elements ``[n]`` with the dimensions in this order; a view if they lie so."""
    return tensor.permute(order).reshape(-1)


def read(name: str, pieces: Iterable[Piece], numel: int, place: Place) -> Tensor:
    """The ``numel`` elements at this place, ``[numel]``.

    :param pieces: of the whole tensor. If they are in another memory order, the whole tensor is put together first
    :raises LookupError: when they are not the pieces of such a tensor, naming it
    """
    pieces = list(pieces)
    if problem := _wrong_pieces(pieces, place.shape):
        raise LookupError(f"has {name} {problem}")
    if pieces[0].place.order != place.order:
        whole = assemble(name, pieces)
        return in_memory_order(whole, place.order)[place.begin : place.begin + numel]
    taken = torch.empty(numel, dtype=pieces[0].values.dtype)
    for piece in pieces:
        first = max(place.begin, piece.place.begin)
        last = min(place.begin + numel, piece.place.begin + piece.values.numel())
        if first < last:
            taken[first - place.begin : last - place.begin] = piece.values[
                first - piece.place.begin : last - piece.place.begin
            ]
    return taken


def assemble(name: str, pieces: Iterable[Piece]) -> Tensor:
    """The whole tensor, laid out in memory as it was saved.

    :raises LookupError: as :func:`read`
    """
    pieces = list(pieces)
    if not pieces:
        raise LookupError(f"lacks {name}")
    _, shape, order = pieces[0].place
    flat = read(name, pieces, torch.Size(shape).numel(), Place(0, shape, order))
    back = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([shape[dim] for dim in order]).permute(back)


def packed(pieces: Mapping[str, Piece]) -> dict[str, dict[str, Any]]:
    """In the types that ``torch.load(weights_only=True)`` reads."""
    return {
        name: {"values": values, "begin": place.begin, "shape": list(place.shape), "order": list(place.order)}
        for name, (values, place) in pieces.items()
    }


class Shards(NamedTuple):
    """All files of a sharded checkpoint.

    :param parameters: the names of the model's parameters, in the order in which an optimizer numbers them
    :param tied: for each further name of a parameter that several modules hold, its first
    :param stateless: names of trained parameters for which the optimizer keeps nothing: they never had a gradient, or it
        keeps nothing for any
    """

    pieces: Saved
    parameters: list[str]
    tied: dict[str, str]
    stateless: list[str]


def shard_content(
    pieces: Mapping[str, Piece], parameters: list[str], tied: dict[str, str], stateless: list[str]
) -> dict[str, Any]:
    """What one rank writes, in the types that ``torch.load(weights_only=True)`` reads; see :class:`Shards`."""
    return {"pieces": packed(pieces), "parameters": parameters, "tied": tied, "stateless": stateless}


def open_shards(path: Path) -> Shards:
    """All pieces of a verified sharded checkpoint, mapped from its files.

    :raises Damaged: when a file holds something else: a forged file can have a matching digest
    """
    found = Shards({}, [], {}, [])
    for key in [name.removesuffix(".pt") for name in shard_files(ranks_of(path))]:
        content = load(path, key, mapped=True)
        if problem := _wrong_content(content):
            raise Damaged(path, f"{key}.pt {problem}")
        for name, fields in content["pieces"].items():
            place = Place(fields["begin"], tuple(fields["shape"]), tuple(fields["order"]))
            found.pieces.setdefault(name, []).append(Piece(fields["values"], place))
        found = found._replace(**{field: content[field] for field in ("parameters", "tied", "stateless")})
    return found


def is_sharded(path: Path) -> bool:
    """Whether a verified checkpoint is in pieces."""
    return ranks_of(path) > 0


def ranks_of(path: Path) -> int:
    """The number of ranks that wrote a verified sharded checkpoint; 0 if it is not sharded. Files that it does not list do not
    count."""
    return sum(name.startswith("rank-") for name in listed_files(path))


def shard_files(ranks: int) -> list[str]:
    """The files that so many ranks write."""
    return [f"{shard_key(rank, ranks)}.pt" for rank in range(ranks)]


def shard_key(rank: int, ranks: int) -> str:
    """The name, without ``.pt``, of the file of one rank."""
    return f"rank-{rank}-of-{ranks}"


def _wrong_content(content: object) -> str | None:
    """What is wrong with a rank's file, or None."""
    kinds = {"pieces": dict, "parameters": list, "tied": dict, "stateless": list}
    if not isinstance(content, dict) or content.keys() != kinds.keys():
        return f"holds a {type(content).__name__} instead of pieces"
    if wrong := [key for key, kind in kinds.items() if not isinstance(content[key], kind)]:
        return f"has {wrong[0]} that are no {kinds[wrong[0]].__name__}"
    names = [*content["pieces"], *content["parameters"], *content["tied"], *content["tied"].values()]
    if not all(isinstance(name, str) for name in [*names, *content["stateless"]]):
        return "has names that are no text"
    for name, fields in content["pieces"].items():
        if not _is_piece(fields):
            return f"has no piece as {name[:60]}"
    return None


def _is_piece(fields: object) -> bool:
    if not isinstance(fields, dict) or fields.keys() != {"values", "begin", "shape", "order"}:
        return False
    values, begin, shape, order = (fields[name] for name in ("values", "begin", "shape", "order"))
    return (
        isinstance(values, Tensor)
        and (values.layout, values.dim()) == (torch.strided, 1)
        and isinstance(shape, list)
        and isinstance(order, list)
        and all(type(number) is int and number >= 0 for number in [begin, *shape, *order])
        and sorted(order) == list(range(len(shape)))
    )


def _wrong_pieces(pieces: list[Piece], shape: tuple[int, ...]) -> str | None:
    """What is wrong with the pieces of a tensor that should have this shape, or None."""
    if not pieces:
        return "nowhere"
    _, found, order = pieces[0].place
    if found != shape:
        return f"of shape {list(found)} instead of {list(shape)}"
    numel, dtype = torch.Size(shape).numel(), pieces[0].values.dtype
    for values, place in pieces:
        if (place.shape, place.order, values.dtype) != (found, order, dtype):
            return "in pieces that are of different tensors"
    at = 0
    for values, place in sorted(pieces, key=lambda piece: piece.place.begin):
        if values.numel() and place.begin != at:
            return f"in pieces with a gap or an overlap at element {min(at, place.begin)}"
        at += values.numel()
    return None if at == numel else f"in pieces of {at} elements instead of {numel}"
