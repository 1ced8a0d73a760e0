"""The reducer of the drop-in: it leaves out buckets that no rank uses, and says when a backward pass is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.autograd.graph import Node

from ddp.by_hand.buckets import Bucket
from ddp.by_hand.reducer import Reducer


class DropInReducer(Reducer):
    """A reducer to which other parts of a wrapper can be attached.

    ``after_backward`` are called at the end of each backward pass that synchronized, ``after_none`` at the end of one that gave no
    parameter a gradient. ``moments`` are of the latest one, in nanoseconds: the begin of backward, the first all-reduce, the end
    of backward's own computation, and the end of all.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.after_backward: list[Callable[[], None]] = []
        self.after_none: list[Callable[[], None]] = []
        self.skip_unused = False  # whether buckets without any gradient are not sent
        self.others_ready = False  # whether a gradient that is in no bucket became ready in this pass
        self.moments: dict[str, int] = {}

    @property
    def rebuilt(self) -> bool:
        """Whether the buckets have got their final order."""
        return self._order is None

    def begin(self, *outputs: Node | None) -> None:
        if not self._running:
            self.others_ready, self.moments = False, {"backward": time.perf_counter_ns()}
        super().begin(*outputs)

    def start(self, bucket: Bucket) -> None:
        self.moments.setdefault("all-reduce", time.perf_counter_ns())
        super().start(bucket)

    def _send(self) -> None:
        bucket = self.buckets[len(self.sent)]
        if self.skip_unused and all(self._remaining[index] > 0 for index in bucket.parameters):
            self.sent.append(_Skipped())
        else:
            super()._send()

    def _finish(self) -> None:
        self.moments["computed"] = time.perf_counter_ns()
        super()._finish()
        # The lesson's reducer still expects a pass if none of its gradients became ready.
        if not self.expecting or self.others_ready:
            self.expecting = False
            for call in self.after_backward:
                call()
            self.moments["end"] = time.perf_counter_ns()
        else:
            for call in self.after_none:
                call()


class _Skipped:
    def wait(self) -> None:
        pass
