"""BatchNorm under data parallelism, and other buffers: whose statistics?

Each rank sees its own part of the global batch. Plain BatchNorm normalizes by that part's mean and variance, and each
rank's running statistics drift apart. There are two remedies, and both are here:

- :func:`make_buffers_equal`: let the ranks differ while training, and average the running statistics before they are used,
  that is, at the end of an epoch, before the evaluation and the checkpoint. (By default DDP sends rank 0's before
  forward passes, in every step: a collective per step, for numbers that a training step never reads.)
- :func:`convert_sync_batchnorm`: normalize by the statistics of the global batch, so that the result does not depend on how it
  was divided. torch's own works on accelerators only; :mod:`ddp.sync_batchnorm` works wherever the backend does.
"""

from __future__ import annotations

import functools
import logging

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from common.errors import UsageError
from ddp.by_hand.replicas import broadcast
from ddp.sync_batchnorm import SyncBatchNorm

logger = logging.getLogger("ddp.train")


def statistics(model: nn.Module) -> list[Tensor]:
    """BatchNorm's running means and variances. Each rank's are an average over its own samples, so their average over the ranks
    covers all samples, where rank 0's covers 1/W."""
    batchnorms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return [b for module in batchnorms for b in (module.running_mean, module.running_var) if b is not None]


@torch.no_grad()
def make_buffers_equal(model: nn.Module) -> None:
    """Give all ranks the same buffers, before they are evaluated or saved. A collective.

    The :func:`statistics` become their average over the ranks, by one all-reduce for all. Other buffers (the statistics of
    InstanceNorm, the codebook of a quantizer and how often each of its entries was used) have no rule of that kind, so they become
    rank 0's, and the log names those in which the ranks differed. They may be of any dtype.
    """
    if dist.get_world_size() == 1:
        return
    averaged = statistics(model)
    of_batchnorm = set(map(id, averaged))
    others = {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in of_batchnorm}
    if averaged:
        flat = torch.cat(averaged)
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for buffer, average in zip(averaged, flat.split([buffer.numel() for buffer in averaged]), strict=True):
            buffer.copy_(average)
    if others:
        _become_rank_0_s(others)


def _become_rank_0_s(buffers: dict[str, Tensor]) -> None:
    own = [buffer.clone() for buffer in buffers.values()]
    broadcast(buffers.values(), 0, dist.distributed_c10d._get_default_group())
    changed = [not torch.equal(before, now) for before, now in zip(own, buffers.values(), strict=True)]
    flags = torch.tensor(changed, dtype=torch.int32, device=own[0].device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    if names := tuple(name for name, differed in zip(buffers, flags.tolist(), strict=True) if differed):
        _log_once(names)


@functools.cache
def _log_once(names: tuple[str, ...]) -> None:
    if dist.get_rank() == 0:
        logger.info("each rank computes its own %s: at the end of each epoch, all take rank 0's", ", ".join(names))


def convert_sync_batchnorm(network: nn.Module, device: torch.device) -> nn.Module:
    """Replace every BatchNorm: by torch's SyncBatchNorm on CUDA, which has fused kernels; by ours elsewhere.

    Parameters and buffers are the same objects as before, and a module that is used in two places remains one. (torch's own
    conversion makes two of it, or leaves the second as it is.) In each of torch's layers the host waits for the GPU in forward:
    it leaves out the ranks without samples, by a mask (torch/nn/modules/_functions.py).

    :raises UsageError: for a subclass with a forward pass of its own
    """
    kind = nn.SyncBatchNorm if device.type == "cuda" else SyncBatchNorm
    converted: dict[nn.Module | None, nn.Module] = {}
    for name, module in network.named_modules():
        if isinstance(module, _BatchNorm):
            if type(module).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
                raise UsageError(f"{name} does more than BatchNorm, which --sync-batchnorm would leave out")
            layer = kind(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
            layer._parameters, layer._buffers = module._parameters, module._buffers
            vars(layer).update({name: hooks for name, hooks in vars(module).items() if "hook" in name})
            converted[module] = layer.train(module.training)
    for module in list(network.modules()):
        for name, part in module._modules.items():
            if part in converted:
                module._modules[name] = converted[part]
    return converted.get(network, network)
