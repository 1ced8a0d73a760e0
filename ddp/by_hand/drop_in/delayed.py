"""Parameters whose gradients are averaged when the gradient of another parameter is ready, all in one all-reduce.

torch's own: ``_register_delay_all_reduce_hook`` in torch/nn/parallel/distributed.py. It never waits for the all-reduce, sends under
``no_sync`` too, and averages what lies in its own memory, which need not be what is in ``.grad``. This one does none of that.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from ddp.by_hand.buckets import Bucket
from ddp.by_hand.drop_in.reducer import DropInReducer, UnbucketedAverage


class DelayedAverage(UnbucketedAverage):
    """Averages the gradients of some parameters in one tensor, when all of them and that of another parameter are ready.

    :param parameters: by name, of one dtype and device
    :param trigger: the parameter whose gradient is waited for; that it is ready after the others is usual, and not needed
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        trigger: nn.Parameter,
        group: dist.ProcessGroup,
        reducer: DropInReducer,
    ) -> None:
        super().__init__(parameters, group, reducer)
        first, size = self.parameters[0], sum(parameter.numel() for parameter in self.parameters)
        buffer = torch.zeros(size, dtype=first.dtype, device=first.device)
        self._bucket = Bucket(dict(enumerate(self.parameters)), buffer, as_view=False)
        self._missing: set[int] = set()  # gradients that are waited for in this pass; the last one is the trigger's
        self._work: dist.Work | None = None
        self._trigger_node = get_gradient_edge(trigger).node
        self.hooks.append(self._trigger_node.register_hook(functools.partial(self.ready, len(self.parameters))))
        reducer.before_backward.append(self._begin)

    def _begin(self) -> None:
        self._wait()  # an exception may have ended the pass before
        self._missing = set(range(len(self.hooks)))

    def ready(self, index: int, *_: object) -> None:
        super().ready(index)
        self._missing.discard(index)
        if self.reducer.expecting and not self._missing and self._work is None:
            self._start()

    def _start(self) -> None:
        bucket = self._bucket
        bucket.to_copy = set(bucket.parameters)
        bucket.fill(1)
        self._work = dist.all_reduce(bucket.buffer.div_(self.reducer.div_factor), group=self.group, async_op=True)

    def average(self) -> None:
        if self._work is None:  # a parameter was not used
            self._start()
        self._wait()
        self._bucket.finalize(self._bucket.parameters)

    def _wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()
