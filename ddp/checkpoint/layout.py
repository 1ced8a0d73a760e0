"""Which part of each parameter this rank has, whatever strategy has sharded it. Checkpoints are written and read by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from common.training.optimization import local
from ddp.checkpoint.pieces import Place
from ddp.sharded.strategies import FullyShard
from ddp.sharded.zero1 import ZeRO1


class Part(NamedTuple):
    """This rank's part of one parameter.

    :param parameter: what the optimizer has: a piece, a DTensor, or a whole parameter that is frozen
    :param numel: elements of this part
    :param replicated: every rank has it whole
    :param in_full: it is a piece in the memory of whole parameters
    """

    parameter: nn.Parameter
    numel: int
    place: Place
    replicated: bool = False
    in_full: bool = False


def layout_of(network: nn.Module) -> dict[str, Part]:
    """The parts of all parameters by name, in the order of the plain module's ``named_parameters()``.

    :param network: what :func:`ddp.sharded.strategies.shard_network` returned
    """
    return dict(_of_fully_shard(network) if isinstance(network, FullyShard) else _of_zero(network))


def _of_zero(network: nn.Module) -> Iterator[tuple[str, Part]]:
    assert isinstance(network, ZeRO1)
    parts: dict[str, Part] = {}
    for flat in network.flats:
        for name, piece, begin, like in zip(flat.owners, flat.sharded, flat.begins(), flat.like, strict=True):
            place = Place.of_whole(like)._replace(begin=begin)
            parts[name] = Part(piece, piece.numel(), place, in_full=flat.shard_in_full)
    for name, parameter in network.module.named_parameters():
        if name in parts:
            yield name, parts[name]
        else:  # frozen, and whole up to stage 2
            yield name, Part(parameter, parameter.numel(), Place.of_whole(parameter), replicated=True)


def _of_fully_shard(network: FullyShard) -> Iterator[tuple[str, Part]]:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for part in network.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # the root stays whole after a forward pass without gradients
    for name, parameter in network.named_parameters():
        assert isinstance(parameter, DTensor)
        shape = tuple(parameter.shape)
        _, offset = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
        own = local(parameter)
        # A rank without rows is told that its part begins where the tensor ends.
        begin = offset[0] * (parameter.numel() // shape[0]) if own.numel() else 0
        yield name, Part(parameter, own.numel(), Place(begin, shape, tuple(range(len(shape)))))
