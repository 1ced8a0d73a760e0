"""The ways to train on several ranks that ``--strategy`` chooses from, and how those with replicas average their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}  # of sharding by hand
BY_HAND = ("handwritten", *STAGES)
ANY_ALL_REDUCE = ("torch", *BY_HAND)  # take --all-reduce; torch's DDP by a communication hook
REPLICATED, SHARDED = ("torch", "naive", "handwritten"), (*STAGES, "fsdp2")
STRATEGIES = (*REPLICATED, *SHARDED)
IN_BUCKETS = ("torch", "handwritten")  # the strategies of replicas that average their gradients in buckets

GRADIENT_PRECISIONS = ("fp32", "bf16")


class Averaging(NamedTuple):
    """How gradients are averaged over the ranks; see the flags of these names.

    :param strategy: one of :data:`STRATEGIES`
    :param all_reduce: one of :data:`ddp.all_reduce.ALL_REDUCES`, ``"backend"`` when None
    :param bucket_mib: MiB of a bucket; DDP's default when None
    :param gradient_precision: one of :data:`GRADIENT_PRECISIONS`
    """

    strategy: str = "torch"
    all_reduce: str | None = None
    bucket_mib: float | None = None
    gradient_precision: str = "fp32"


def register_hook(model: Any, state: Any, hook: Callable[..., Any]) -> None:
    """The model's ``register_comm_hook``, for any backend.

    torch knows ``bf16_compress_hook`` by its name, and refuses it where it was built without NCCL. gloo sums bf16 too, so the
    lambda hides the name.
    """
    model.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
