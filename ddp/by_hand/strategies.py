"""The hand-written ways to average gradients that ``--strategy`` of ddp.train chooses from, beside torch's own."""

from __future__ import annotations

from torch import nn

from common.distributed.dist_env import DistEnv
from common.errors import UsageError


def wrap_by_hand(module: nn.Module, env: DistEnv, strategy: str, all_reduce: str | None = None) -> nn.Module:
    """The module, so that every backward pass ends with the average of its gradients over the ranks.

    :param module: the same on every rank
    :param env: this rank
    :param strategy: ``"naive"`` (an all-reduce per parameter) or ``"handwritten"`` (buckets that overlap with backward)
    :param all_reduce: how the second sums its buckets, one of :data:`ddp.all_reduce.ALL_REDUCES`; ``"backend"`` when None
    :raises UsageError: on every rank, for an all-reduce that cannot run here
    """
    # Imported here, so that a job with torch's DDP imports none of it.
    if strategy == "naive":
        from ddp.by_hand.naive import NaiveDistributedDataParallel

        return NaiveDistributedDataParallel(module)

    from ddp.all_reduce.choice import build_all_reduce
    from ddp.by_hand.wrapper import HandwrittenDistributedDataParallel

    all_reduce = all_reduce or "backend"
    on_gpu = env.device.type == "cuda"
    if on_gpu and all_reduce != "backend":
        raise UsageError(f"--all-reduce {all_reduce} sums tensors of the CPU, not of {env.device}: use backend")
    with env.fail_together():  # shared memory may be short on one host
        algorithm = build_all_reduce(all_reduce)
    with env.fail_together():
        return HandwrittenDistributedDataParallel(
            module, [env.device] if on_gpu else None, broadcast_buffers=False, all_reduce=algorithm
        )
