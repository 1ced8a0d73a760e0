"""The ways to train on several ranks that ``--strategy`` chooses from, and how those with replicas average their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}  # of sharding by hand
BY_HAND = ("handwritten", *STAGES)  # with an all-reduce of ours
REPLICATED, SHARDED = ("torch", "naive", "handwritten"), (*STAGES, "fsdp2")
STRATEGIES = (*REPLICATED, *SHARDED)
IN_BUCKETS = ("torch", "handwritten")  # the strategies of replicas that average their gradients in buckets

GRADIENT_PRECISIONS = ("fp32", "bf16")


class Averaging(NamedTuple):
    """How gradients are averaged over the ranks; see the flags of these names.

    :param strategy: one of :data:`STRATEGIES`
    :param all_reduce: one of :data:`ddp.all_reduce.ALL_REDUCES`, for what is written by hand; ``"backend"`` when None
    :param bucket_mib: MiB of a bucket; DDP's default when None
    :param gradient_precision: one of :data:`GRADIENT_PRECISIONS`
    """

    strategy: str = "torch"
    all_reduce: str | None = None
    bucket_mib: float | None = None
    gradient_precision: str = "fp32"


def compress_gradients(model: nn.Module, precision: str) -> None:
    """Let a DDP module send its gradients in this precision, by a communication hook of torch's.

    A bucket is rounded to bf16, divided by the number of ranks, all-reduced, and copied back into fp32. That is half the bytes.
    The sum is rounded too, so more ranks lose more. (torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py.)

    :param model: torch's ``DistributedDataParallel`` or ``HandwrittenDistributedDataParallel``, before its first backward pass
    :param precision: one of :data:`ddp.strategies.GRADIENT_PRECISIONS`; with ``"fp32"`` they are sent as they are
    """
    if precision == "bf16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        register_hook(model, None, bf16_compress_hook)


def register_hook(model: Any, state: Any, hook: Callable[..., Any]) -> None:
    """The model's ``register_comm_hook``, for any backend.

    torch knows ``bf16_compress_hook`` by its name, and refuses it where it was built without NCCL. gloo sums bf16 too, so the
    lambda hides the name.
    """
    model.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
