"""All-reduce by hand: every rank brings a tensor, every rank ends with the sum. One algorithm a file.

backend            torch's own: dist.all_reduce, by gloo or NCCL
naive              rank 0 collects, adds and sends the sum to all
ring               every rank talks to its two neighbours only, and all links are always busy
halving-doubling   partners exchange halves, then quarters, ...: as few bytes as a ring, in fewer steps
tree               sums go up a tree and come down again: few steps, but of whole tensors
shared-memory      the ranks of one host add up what lies in memory that all of them map
hierarchical       shared memory on each host, rings between the hosts

Naive, ring, halving-doubling and tree consist of sends and receives alone, for CPU tensors. In each, every element's sum is
completed on one rank and copied to the others. So all ranks hold the same bits and take the same step.

The backend's, the ring and shared memory consist of a reduce-scatter and an all-gather that can be used alone (sharded.py). The
sharded strategies of ddp/sharded/ live on them.

Their docstrings give the time of each in the alpha-beta model: a message of m bytes takes alpha + beta m seconds, whatever
else is sent. A rank sends one message and receives one at a time, and adding takes no time. The tensor has n bytes, the
group W ranks.

comm_hook.py gives them to torch's DDP:

    model = DistributedDataParallel(network)
    model.register_comm_hook(*shared_memory_hook())
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp.all_reduce.comm_hook import shared_memory_hook

__all__ = ["ALL_REDUCES", "SHARDABLE", "shared_memory_hook"]

ALL_REDUCES = ("backend", "naive", "ring", "halving-doubling", "tree", "shared-memory", "hierarchical")
SHARDABLE = ("backend", "ring", "shared-memory")


def __getattr__(name: str) -> Any:
    """Import it when it is first used: ``--help`` needs only the names above."""
    if name != "shared_memory_hook":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from ddp.all_reduce.comm_hook import shared_memory_hook

    return shared_memory_hook
