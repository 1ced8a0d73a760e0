"""BatchNorm over the global batch, on any device and backend; the mathematics of ``torch.nn.SyncBatchNorm``.

It imports torch alone, so that a script that is run on a stand-in for GPUs can have it, too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm


class _SynchronizedNormalization(torch.autograd.Function):
    """y = (x - mean) * invstd * weight + bias, with mean and variance over all ranks; the derivative likewise."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        axes = [axis for axis in range(x.dim()) if axis != 1]
        count = x.numel() // x.shape[1]
        variance, mean = torch.var_mean(x, axes, correction=0)
        # Every rank's count, mean and variance; combined as in Chan, Golub and LeVeque (1979): no sum of squares, whose
        # difference from the squared sum would lose the small digits.
        mine = torch.cat([mean, variance, mean.new_full((1,), count)])
        everyone = mine.new_empty(dist.get_world_size(group), mine.numel())
        dist.all_gather(list(everyone.unbind()), mine, group)
        means, variances, counts = everyone.split([x.shape[1], x.shape[1], 1], dim=1)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        variance = (counts * (variances + (means - mean) ** 2)).sum(0) / total

        invstd = torch.rsqrt(variance + eps)
        normalized = (x - _per_channel(mean, x)) * _per_channel(invstd, x)
        ctx.save_for_backward(normalized, weight, invstd, total)
        ctx.axes, ctx.has_bias, ctx.group = axes, bias is not None, group
        y = normalized
        if weight is not None:
            y = y * _per_channel(weight, x)
        if bias is not None:
            y = y + _per_channel(bias, x)
        ctx.mark_non_differentiable(mean, variance, total)
        return y, mean, variance, total

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, *_: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        normalized, weight, invstd, total = ctx.saved_tensors
        grad_bias = grad_y.sum(ctx.axes)
        grad_weight = (grad_y * normalized).sum(ctx.axes)
        # The weights' gradients stay this rank's own: DDP averages them with all others. The input's needs the sums over
        # the global batch, since every sample had a part in the mean and the variance.
        sums = torch.stack([grad_bias, grad_weight])
        dist.all_reduce(sums, group=ctx.group)
        grad_x = grad_y - (_per_channel(sums[0], grad_y) + normalized * _per_channel(sums[1], grad_y)) / total
        scale = invstd if weight is None else invstd * weight
        return (
            grad_x * _per_channel(scale, grad_y),
            None if weight is None else grad_weight,
            grad_bias if ctx.has_bias else None,
            None,
            None,
        )


class SyncBatchNorm(_BatchNorm):
    """BatchNorm over the batches of all ranks.

    Input float ``[n, channels, ...]``, n may differ between the ranks. Two collectives per training step and layer: a
    gather of 2 x channels + 1 numbers in the forward pass, an all-reduce of 2 x channels in the backward pass.
    """

    process_group: Any = None  # the default group; torch's class has it, too

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            return _BatchNorm.forward(self, input)  # self may be torch's class
        output, mean, variance, total = _SynchronizedNormalization.apply(
            input if input.dtype == torch.float64 else input.float(),
            self.weight,
            self.bias,
            self.eps,
            self.process_group,
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


def _per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """``vector`` shaped to broadcast along the channels of ``like``, its dimension 1."""
    return vector.view([-1 if i == 1 else 1 for i in range(like.dim())])
