"""ZeRO stage 2: the gradients are sharded too.

    model = shard(network, stage=2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(inputs).sum().backward()
    optimizer.step()

At stage 1 every rank holds all gradients until the end of backward, and then uses 1/p of them. Here the gradients of a unit
are reduce-scattered as soon as the last of them is ready, while backward goes on with the layers below, and are then freed. A
rank holds its shard of all gradients, and the whole gradients of the units in flight. (arXiv 1910.02054, section 5.2.)

Within ``no_sync`` nothing is reduced, so gradients stay whole. Without it, each micro-step costs a reduce-scatter, and only the
shards' gradients add up, in 1/p of the memory.
"""

from __future__ import annotations

from collections import deque

from torch import Tensor

from ddp.sharded.flat import FlatParameters
from ddp.sharded.zero1 import ZeRO1

IN_FLIGHT = 2  # reductions at the same time: one unit's gradients are sent while the next unit's are computed


class ZeRO2(ZeRO1):
    """Shards the optimizer's state and the gradients. See :class:`ddp.sharded.zero1.ZeRO1` for the parameters."""

    stage = 2

    def _begin_backward(self) -> None:
        if not self._running:
            # Not sent yet: last unit first, as backward goes. All ranks send in this order.
            self._waiting = deque(reversed(self.flats) if self._synchronizes else ())
            self._complete: set[FlatParameters] = set()  # all gradients came in this pass
            self._sent: deque[FlatParameters] = deque()  # in flight
        super()._begin_backward()

    def _ready(self, flat: FlatParameters, index: int, _: Tensor) -> None:
        self._begin_backward()
        if flat.add_gradient(index):
            self._complete.add(flat)
            # Collectives are matched by their order, so complete gradients wait for those that come before them.
            while self._waiting and self._waiting[0] in self._complete:
                self._send()

    def _send(self) -> None:
        """Start the next reduce-scatter. If :data:`IN_FLIGHT` run already, wait for the oldest first."""
        if len(self._sent) == IN_FLIGHT:
            self._sent.popleft().finish_reduce()
        flat = self._waiting.popleft()
        flat.start_reduce()
        self._sent.append(flat)

    def _reduce(self) -> None:
        while self._waiting:  # units in which some parameters were not used, and those behind them
            self._send()
        while self._sent:
            self._sent.popleft().finish_reduce()
