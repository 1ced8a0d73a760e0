"""Between this project's checkpoints and those of ``torch.distributed.checkpoint`` (DCP).

    import torch.distributed.checkpoint as dcp
    from ddp.checkpoint.dcp import PieceReader, load_parameters

    state = {"model": model.state_dict()}  # plain tensors or DTensors
    dcp.load(state, storage_reader=PieceReader("runs/sums-gpt/checkpoints/epoch-0010-step-00001250"))

    load_parameters(network, "a-folder-of-dcp.save")  # into a network that is sharded here

DCP names tensors as ``get_state_dict`` does: ``model.NAME`` and ``optimizer.state.NAME.exp_avg``. It keeps what its files hold in a
pickle, ``.metadata``, so read only what you trust. This project's own files are read with ``weights_only=True``.
(torch/distributed/checkpoint/storage.py and filesystem.py.)
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint._storage_utils import _storage_setup
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from common.errors import UsageError
from ddp.checkpoint.layout import layout_of
from ddp.checkpoint.pieces import Piece, Saved, assemble, in_memory_order, is_sharded, open_shards
from ddp.checkpoint.shards import WEIGHT, flat
from ddp.checkpoint.storage import verify
from ddp.sharded.zero1 import ZeRO1


class PieceReader(StorageReader):
    """Lets ``dcp.load`` read a sharded checkpoint of this project. On every rank, one tensor at a time is whole.

    :param path: the checkpoint's folder
    :raises Damaged: when it is not as it was written
    :raises UsageError: when it is not sharded
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.reset(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read another checkpoint from now on; None changes nothing."""
        if checkpoint_id is None:
            return
        path = Path(checkpoint_id)
        verify(path)
        if not is_sharded(path):
            raise UsageError(f"{path} is of replicas: torch.load reads its model.pt")
        pieces, _, tied, _ = open_shards(path)
        self._pieces: Saved = {_name_in_dcp(name): parts for name, parts in pieces.items()}
        for name, parts in pieces.items():
            kind, _, parameter = name.partition(":")
            self._pieces |= {_name_in_dcp(f"{kind}:{alias}"): parts for alias in tied if tied[alias] == parameter}

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """All tensors, each as one chunk."""
        found: dict[str, Any] = {name: _as_one_chunk(pieces[0]) for name, pieces in self._pieces.items()}
        return Metadata(state_dict_metadata=found, storage_meta=StorageMeta())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Nothing is to be set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what this rank has planned to load."""
        for item in plan.items:
            name = item.storage_index.fqn
            taken = assemble(name, self._pieces[name])
            for dim, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                taken = taken.narrow(dim, begin, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(taken)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it may be a checkpoint's folder."""
        return Path(checkpoint_id).is_dir()


@torch.no_grad()
def load_parameters(network: nn.Module, path: str | os.PathLike[str], prefix: str = f"{WEIGHT}.") -> None:
    """Take this rank's part of every parameter from a folder that ``dcp.save`` wrote. One tensor at a time is whole.

    :param network: what :func:`ddp.sharded.strategies.shard_network` returned
    :param prefix: of the parameters' names in the folder
    :raises CheckpointException: when the folder lacks one
    """
    reader = cast(StorageReader, _storage_setup(None, path, reader=True))  # the one that load() would choose
    # Every load() asks for the metadata of the whole folder.
    reader.read_metadata = functools.cache(reader.read_metadata)  # type: ignore[method-assign]
    for name, part in layout_of(network).items():
        whole = {f"{prefix}{name}": torch.empty(part.place.shape, dtype=part.parameter.dtype)}
        load(whole, storage_reader=reader, no_dist=True)
        values = in_memory_order(whole[f"{prefix}{name}"], part.place.order)
        flat(part.parameter).copy_(values[part.place.begin : part.place.begin + part.numel])
    if isinstance(network, ZeRO1):
        network.shards_changed()


def _name_in_dcp(name: str) -> str:
    kind, _, parameter = name.partition(":")
    return f"{WEIGHT}.{parameter}" if kind == WEIGHT else f"optimizer.state.{parameter}.{kind}"


def _as_one_chunk(piece: Piece) -> TensorStorageMetadata:
    size = torch.Size(piece.place.shape)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(TensorProperties(dtype=piece.values.dtype), size, [chunk])
