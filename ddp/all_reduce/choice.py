"""The all-reduces by the names that ``--all-reduce`` takes (see ddp/all_reduce/__init__.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from ddp.all_reduce.backend import Backend
from ddp.all_reduce.base import AllReduce
from ddp.all_reduce.halving_doubling import HalvingDoubling
from ddp.all_reduce.hierarchical import Hierarchical
from ddp.all_reduce.naive import Naive
from ddp.all_reduce.p2p import P2P
from ddp.all_reduce.ring import Ring
from ddp.all_reduce.shared_memory import SharedMemory
from ddp.all_reduce.tree import Tree


def backend(p2p: P2P) -> Backend:
    """The backend's all-reduce, for the same ranks."""
    return Backend(p2p.group)


_BY_NAME: dict[str, Callable[[P2P], AllReduce]] = {
    "backend": backend,
    "naive": Naive,
    "ring": Ring,
    "halving-doubling": HalvingDoubling,
    "tree": Tree,
    "shared-memory": SharedMemory,
    "hierarchical": Hierarchical,
}


def build_all_reduce(name: str, group: dist.ProcessGroup | None = None) -> AllReduce:
    """The algorithm of that name for the ranks of a group; a collective. Close it if the process goes on without it.

    It waits for a rank as long as the group's own collectives do.

    :param name: one of :data:`ddp.all_reduce.ALL_REDUCES`
    :param group: the default group when None
    :raises ValueError: for an unknown name
    :raises UsageError: on all ranks, where the algorithm cannot run: see its class
    """
    if name not in _BY_NAME:
        raise ValueError(f"no all-reduce is called {name!r}: choose from {', '.join(_BY_NAME)}")
    return _BY_NAME[name](P2P(group))
