"""The ways to all-reduce, by name: what ``--all-reduce`` chooses from."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from ddp.all_reduce.algorithms import AllReduce, Backend, HalvingDoubling, Naive, Ring, Tree
from ddp.all_reduce.hierarchical import Hierarchical
from ddp.all_reduce.p2p import P2P
from ddp.all_reduce.shared_memory import SharedMemory

_ALGORITHMS: dict[str, Callable[[P2P], AllReduce]] = {
    "backend": Backend,
    "naive": Naive,
    "ring": Ring,
    "halving-doubling": HalvingDoubling,
    "tree": Tree,
    "shared-memory": SharedMemory,
    "hierarchical": Hierarchical,
}
ALL_REDUCES = tuple(_ALGORITHMS)


def build_all_reduce(name: str, group: dist.ProcessGroup | None = None) -> AllReduce:
    """The algorithm of that name for the ranks of a group, a collective; to be closed, if the process goes on without it.

    It waits for a rank as long as the group's own collectives do.

    :param group: the default group when None
    :raises ValueError: for an unknown name
    :raises UsageError: on all ranks, where the algorithm cannot run: see its class
    """
    if name not in _ALGORITHMS:
        raise ValueError(f"no all-reduce is called {name!r}: choose from {', '.join(ALL_REDUCES)}")
    return _ALGORITHMS[name](P2P(group))
