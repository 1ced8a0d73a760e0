"""Parameters whose gradients are averaged when the gradient of another parameter is ready, all in one all-reduce.

torch's own: ``_register_delay_all_reduce_hook`` in torch/nn/parallel/distributed.py. It never waits for the all-reduce, and sends
under ``no_sync`` too; this one does neither.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.by_hand.drop_in.reducer import DropInReducer


class DelayedAverage:
    """Keeps the gradients of some parameters in one tensor, and averages it during backward.

    :param parameters: of one dtype and device
    :param trigger: the gradients of the others must be ready before that of this parameter
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        trigger: nn.Parameter,
        group: dist.ProcessGroup,
        reducer: DropInReducer,
    ) -> None:
        self._parameters, self._group, self._reducer = list(parameters), group, reducer
        first = self._parameters[0]
        self._buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        pieces = self._buffer.split([p.numel() for p in parameters])
        self._views = [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]
        self._work: dist.Work | None = None
        self.hooks = [trigger.register_hook(self._average)]
        reducer.after_backward.append(self._wait)

    @torch.no_grad()
    def prepare(self) -> None:
        """After a forward pass: let autograd add the gradients up where they are averaged."""
        self._wait()  # an exception may have ended the backward pass before
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is None:
                parameter.grad = view.zero_()
            elif parameter.grad is not view:
                parameter.grad = view.copy_(parameter.grad)

    def _average(self, _: Tensor) -> None:
        if not self._reducer.expecting:
            return
        self._reducer.begin()  # it ends this pass, also if none of its own gradients becomes ready
        self._reducer.others_ready = True
        self._buffer.div_(self._reducer.divisor)
        self._work = dist.all_reduce(self._buffer, group=self._group, async_op=True)

    def _wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()
