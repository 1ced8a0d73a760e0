"""BatchNorm under data parallelism: whose statistics?

Each rank sees its own part of the global batch. Plain BatchNorm normalizes by that part's mean and variance, and each
rank's running statistics drift apart. There are two remedies, and both are here:

- :func:`average_running_statistics`: let the ranks differ while training, and average the running statistics before they
  are used, that is, before an evaluation or a checkpoint. (DDP's own ``broadcast_buffers=True`` sends rank 0's before
  every forward pass: a collective per step, for numbers that a training step never reads.)
- :class:`SyncBatchNorm`: normalize by the statistics of the global batch, so that the result does not depend on how it
  was divided. torch's own works on accelerators only; this one works wherever the backend does.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@torch.no_grad()
def average_running_statistics(model: nn.Module) -> None:
    """Replace every BatchNorm's running mean and variance by their average over the ranks; one all-reduce for all.

    Each rank's are an average over its own samples, so their average covers all samples, where rank 0's covers 1/W.
    """
    statistics = [
        buffer
        for module in model.modules()
        if isinstance(module, _BatchNorm)
        for buffer in (module.running_mean, module.running_var)
        if buffer is not None
    ]
    if not statistics or dist.get_world_size() == 1:
        return
    flat = torch.cat(statistics)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for buffer, average in zip(statistics, flat.split([buffer.numel() for buffer in statistics]), strict=True):
        buffer.copy_(average)


class SavedStatistics:
    """A copy of a network's buffers, to undo what the forward passes of a skipped step do to BatchNorm's statistics."""

    def __init__(self, network: nn.Module) -> None:
        buffers = sorted(network.buffers(), key=lambda buffer: str(buffer.dtype))
        of_one_dtype = [list(same) for _, same in itertools.groupby(buffers, key=lambda buffer: buffer.dtype)]
        self._groups = [_SavedBuffers(same) for same in of_one_dtype]

    @torch.no_grad()
    def save(self) -> None:
        """Before the forward passes."""
        for group in self._groups:
            torch._foreach_copy_(group.saved, group.buffers)

    @torch.no_grad()
    def restore(self, where: Tensor | None = None) -> None:
        """After the step.

        :param where: bool 0-d, on the device: whether to restore; always when None. The host need not know it
        """
        for group in self._groups:
            saved = group.saved if where is None else group.chosen(where)
            torch._foreach_copy_(group.buffers, saved)


class _SavedBuffers:
    """Buffers of one dtype, and the memory into which they are saved: in one piece, for a GPU to choose by few kernels."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self.buffers = buffers
        self._flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        self.saved = self._split(self._flat)

    def chosen(self, where: Tensor) -> list[Tensor]:
        """The saved values if ``where`` is true, else the present ones."""
        now = torch.cat([buffer.reshape(-1) for buffer in self.buffers])
        return self._split(torch.where(where, self._flat, now))

    def _split(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([buffer.numel() for buffer in self.buffers])
        return [part.view(buffer.shape) for part, buffer in zip(parts, self.buffers, strict=True)]


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
            input.float(), self.weight, self.bias, self.eps
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

    @classmethod
    def convert(cls, module: nn.Module) -> nn.Module:
        """Replace every BatchNorm below ``module``, keeping parameters, buffers and ``state_dict`` keys."""
        if isinstance(module, _BatchNorm):
            converted = cls(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
            converted.load_state_dict(module.state_dict())
            return converted.train(module.training)
        for name, child in module.named_children():
            setattr(module, name, cls.convert(child))
        return module


def convert_sync_batchnorm(module: nn.Module, device: torch.device) -> nn.Module:
    """Torch's SyncBatchNorm on CUDA, which has fused kernels; the one above elsewhere.

    In each of torch's layers the host waits for the GPU in forward: it leaves out the ranks without samples, by a mask
    (torch/nn/modules/_functions.py).
    """
    if device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        return converted
    return SyncBatchNorm.convert(module)


def _per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """``vector`` shaped to broadcast along the channels of ``like``, its dimension 1."""
    return vector.view([-1 if i == 1 else 1 for i in range(like.dim())])
