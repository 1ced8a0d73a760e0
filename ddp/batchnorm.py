"""BatchNorm under data parallelism, and other buffers: whose statistics?

Each rank sees its own part of the global batch. Plain BatchNorm normalizes by that part's mean and variance, and each
rank's running statistics drift apart. There are two remedies, and both are here:

- :func:`make_buffers_equal`: let the ranks differ while training, and average the running statistics before they are used,
  that is, at the end of an epoch, before the evaluation and the checkpoint. (By default DDP sends rank 0's before
  forward passes, in every step: a collective per step, for numbers that a training step never reads.)
- :class:`SyncBatchNorm`: normalize by the statistics of the global batch, so that the result does not depend on how it
  was divided. torch's own works on accelerators only; this one works wherever the backend does.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from common.errors import UsageError
from ddp.by_hand.replicas import broadcast

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


class _SynchronizedNormalization(torch.autograd.Function):
    """y = (x - mean) * invstd * weight + bias, with mean and variance over all ranks; the derivative likewise."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        axes = [axis for axis in range(x.dim()) if axis != 1]
        count = x.numel() // x.shape[1]
        variance, mean = torch.var_mean(x, axes, correction=0)
        # Every rank's count, mean and variance; combined as in Chan, Golub and LeVeque (1979): no sum of squares, whose
        # difference from the squared sum would lose the small digits.
        mine = torch.cat([mean, variance, mean.new_full((1,), count)])
        everyone = mine.new_empty(dist.get_world_size(), mine.numel())
        dist.all_gather(list(everyone.unbind()), mine)
        means, variances, counts = everyone.split([x.shape[1], x.shape[1], 1], dim=1)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        variance = (counts * (variances + (means - mean) ** 2)).sum(0) / total

        invstd = torch.rsqrt(variance + eps)
        normalized = (x - _per_channel(mean, x)) * _per_channel(invstd, x)
        ctx.save_for_backward(normalized, weight, invstd, total)
        ctx.axes, ctx.has_bias = axes, bias is not None
        y = normalized
        if weight is not None:
            y = y * _per_channel(weight, x)
        if bias is not None:
            y = y + _per_channel(bias, x)
        ctx.mark_non_differentiable(mean, variance, total)
        return y, mean, variance, total

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, *_: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        normalized, weight, invstd, total = ctx.saved_tensors
        grad_bias = grad_y.sum(ctx.axes)
        grad_weight = (grad_y * normalized).sum(ctx.axes)
        # The weights' gradients stay this rank's own: DDP averages them with all others. The input's needs the sums over
        # the global batch, since every sample had a part in the mean and the variance.
        sums = torch.stack([grad_bias, grad_weight])
        dist.all_reduce(sums)
        grad_x = grad_y - (_per_channel(sums[0], grad_y) + normalized * _per_channel(sums[1], grad_y)) / total
        scale = invstd if weight is None else invstd * weight
        return (
            grad_x * _per_channel(scale, grad_y),
            None if weight is None else grad_weight,
            grad_bias if ctx.has_bias else None,
            None,
        )


class SyncBatchNorm(_BatchNorm):
    """BatchNorm over the global batch, on any device and backend; the mathematics of ``torch.nn.SyncBatchNorm``.

    Input float ``[n, channels, ...]``, n may differ between the ranks. Two collectives per training step and layer: a
    gather of 2 x channels + 1 numbers in the forward pass, an all-reduce of 2 x channels in the backward pass.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        output, mean, variance, total = _SynchronizedNormalization.apply(
            input if input.dtype == torch.float64 else input.float(), self.weight, self.bias, self.eps
        )
        if self.track_running_stats:
            with torch.no_grad():
                assert self.num_batches_tracked is not None
                self.num_batches_tracked += 1
                share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean, share)  # type: ignore[union-attr]
                self.running_var.lerp_(variance * total / (total - 1), share)  # type: ignore[union-attr]
        normalized: Tensor = output.to(input.dtype)
        return normalized


def convert_sync_batchnorm(network: nn.Module, device: torch.device) -> nn.Module:
    """Replace every BatchNorm: by torch's SyncBatchNorm on CUDA, which has fused kernels; by the one above elsewhere.

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


def _per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """``vector`` shaped to broadcast along the channels of ``like``, its dimension 1."""
    return vector.view([-1 if i == 1 else 1 for i in range(like.dim())])
