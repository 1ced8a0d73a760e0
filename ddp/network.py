"""The network of a job, and what trains it in another way than torch's DDP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from common.data.datasets import ImageData
from common.distributed.dist_env import DistEnv
from common.errors import UsageError
from common.models.build import build_model
from common.models.modules import to_device
from common.randomness import derive_seed
from ddp import by_hand, sharded
from ddp.all_reduce.choice import build_all_reduce
from ddp.all_reduce.comm_hook import hook_of
from ddp.batchnorm import convert_sync_batchnorm
from ddp.by_hand.replicas import require_same_modules
from ddp.checkpoint.storage import RunCheckpoint, load_weights
from ddp.config import TrainConfig
from ddp.strategies import SHARDED, Averaging, register_hook


def build_network(
    config: TrainConfig, env: DistEnv, data: ImageData, checkpoint: RunCheckpoint | None = None
) -> nn.Module:
    """The network on this rank's device. All ranks build the same.

    :param checkpoint: to continue from. Rank 0 reads its weights, and DDP broadcasts them. (Each rank reads its shards later.)
    :raises UsageError: on every rank, if the ranks' models or settings differ
    """
    torch.manual_seed(derive_seed(config.seed, "weights"))
    network = build_model(config.model, data.shape, len(data.classes), config.dropout, config.model_size)
    network = to_device(network, env.device, config.memory_format)
    with env.fail_together():
        if checkpoint is not None and env.is_main and not config.is_sharded:
            load_weights(network, checkpoint.path)
    if config.sync_batchnorm:
        network = convert_sync_batchnorm(network, env.device)
    if not config.is_sharded:  # shard_network() checks more
        if env.device.type == "cuda" and config.all_reduce not in (None, "backend"):
            raise UsageError(
                f"--all-reduce {config.all_reduce} sums tensors of the CPU, not of {env.device}: use backend"
            )
        require_same_modules(network, config.averaging._asdict())
    return network


def wrap_by_hand_or_sharded(network: nn.Module, env: DistEnv, averaging: Averaging, precision: str) -> Any:
    """The network in a DDP by hand, or with this rank's shards in the place of its parameters: a module with ``no_sync()``.

    :raises UsageError: on every rank, if the strategy cannot train this network, or the all-reduce cannot run here
    """
    if averaging.strategy in SHARDED:
        return sharded.shard_network(network, env, averaging.strategy, averaging.all_reduce, precision)
    if averaging.strategy == "naive":
        return by_hand.NaiveDistributedDataParallel(network)
    in_bf16 = averaging.gradient_precision == "bf16"
    with env.fail_together():  # shared memory may be short on one host
        algorithm = build_all_reduce("backend" if in_bf16 else averaging.all_reduce or "backend")
    device_ids = [env.device] if env.device.type == "cuda" else None
    with env.fail_together():
        model = by_hand.HandwrittenDistributedDataParallel(
            network, device_ids, bucket_cap_mb=averaging.bucket_mib, broadcast_buffers=False, all_reduce=algorithm
        )
    if in_bf16:
        average_by_hook(model, averaging, env)
    return model


def average_by_hook(model: Any, averaging: Averaging, env: DistEnv) -> None:
    """Let a DDP module average by another all-reduce than the backend's, or in bf16, by a communication hook.

    In bf16, a bucket is rounded, divided by the number of ranks, all-reduced, and copied back into fp32. That is half the bytes.
    The sum is rounded too, so more ranks lose more. (torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py.)

    :param model: torch's ``DistributedDataParallel`` or ``HandwrittenDistributedDataParallel``, before its first backward pass
    :raises UsageError: on every rank, for an all-reduce that cannot run here
    """
    in_bf16 = averaging.gradient_precision == "bf16"
    if averaging.all_reduce not in (None, "backend"):
        with env.fail_together():
            state_and_hook = hook_of(averaging.all_reduce, dtype=torch.bfloat16 if in_bf16 else None)
        model.register_comm_hook(*state_and_hook)
    elif in_bf16:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        register_hook(model, None, bf16_compress_hook)


def clip_grad_norm_of_shards(parameters: Any, max_norm: float) -> Tensor:
    """As ``nn.utils.clip_grad_norm_``, where no rank has all gradients. A collective."""
    return sharded.clip_grad_norm_(parameters, max_norm)
