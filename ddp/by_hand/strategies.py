"""The hand-written ways to average gradients that ``--strategy`` of ddp.train chooses from, beside torch's own."""

from __future__ import annotations

from torch import nn

from common.distributed.dist_env import DistEnv
from common.errors import UsageError
from ddp.strategies import Averaging, compress_gradients


def wrap_by_hand(module: nn.Module, env: DistEnv, averaging: Averaging) -> nn.Module:
    """The module, so that every backward pass ends with the average of its gradients over the ranks.

    :param module: the same on every rank
    :param env: this rank
    :param averaging: its strategy is ``"naive"`` (an all-reduce per parameter) or ``"handwritten"`` (buckets that overlap with
        backward)
    :raises UsageError: on every rank, for an all-reduce that cannot run here
    """
    # Imported here, so that a job with torch's DDP imports none of it.
    if averaging.strategy == "naive":
        from ddp.by_hand.naive import NaiveDistributedDataParallel

        return NaiveDistributedDataParallel(module)

    from ddp.all_reduce.choice import build_all_reduce
    from ddp.by_hand.wrapper import HandwrittenDistributedDataParallel

    all_reduce = averaging.all_reduce or "backend"
    on_gpu = env.device.type == "cuda"
    if on_gpu and all_reduce != "backend":
        raise UsageError(f"--all-reduce {all_reduce} sums tensors of the CPU, not of {env.device}: use backend")
    with env.fail_together():  # shared memory may be short on one host
        algorithm = build_all_reduce(all_reduce)
    device_ids = [env.device] if on_gpu else None
    with env.fail_together():
        model = HandwrittenDistributedDataParallel(
            module, device_ids, bucket_cap_mb=averaging.bucket_mib, broadcast_buffers=False, all_reduce=algorithm
        )
    compress_gradients(model, averaging.gradient_precision)
    return model
