"""The ways to train on several ranks that ``--strategy`` chooses from, and how those with replicas average their gradients."""

from __future__ import annotations

from typing import NamedTuple

from common.errors import UsageError
from ddp.all_reduce import SHARDABLE

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}  # of sharding by hand
REPLICATED, SHARDED = ("torch", "naive", "handwritten"), (*STAGES, "fsdp2")
STRATEGIES = (*REPLICATED, *SHARDED)
IN_BUCKETS = ("torch", "handwritten")  # the strategies of replicas that average their gradients in buckets

GRADIENT_PRECISIONS = ("fp32", "bf16")


class Averaging(NamedTuple):
    """How the gradients of replicas are averaged over the ranks; see the flags of these names.

    :param strategy: one of :data:`REPLICATED`
    :param all_reduce: one of :data:`ddp.all_reduce.ALL_REDUCES`, for ``handwritten``; ``"backend"`` when None
    :param bucket_mib: MiB of a bucket; DDP's default when None
    :param gradient_precision: one of :data:`GRADIENT_PRECISIONS`
    """

    strategy: str = "torch"
    all_reduce: str | None = None
    bucket_mib: float | None = None
    gradient_precision: str = "fp32"


def require_shardable(all_reduce: str, strategy: str) -> None:
    """:raises UsageError: when the stages of sharding by hand cannot use this all-reduce"""
    if all_reduce not in SHARDABLE:
        raise UsageError(
            f"--all-reduce {all_reduce} has no reduce-scatter and all-gather for --strategy {strategy}: use {', '.join(SHARDABLE)}"
        )
