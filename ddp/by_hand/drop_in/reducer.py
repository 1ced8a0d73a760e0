"""The reducer of the drop-in: it leaves out buckets that no rank uses, and says when a backward pass is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.autograd.graph import Node

from ddp.by_hand.buckets import Bucket
from ddp.by_hand.reducer import Reducer


class DropInReducer(Reducer):
    """A reducer to which other parts of a wrapper can be attached.

    ``before_backward`` are called when a backward pass that synchronizes begins, ``after_backward`` when it has ended, ``after_none``
    when one has ended that gave no parameter a gradient. ``moments`` are of the latest one, in nanoseconds: the begin of backward,
    the first all-reduce, the end of backward's own computation, and the end of all.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.before_backward: list[Callable[[], None]] = []
        self.after_backward: list[Callable[[], None]] = []
        self.after_none: list[Callable[[], None]] = []
        self.skip_unused = False  # whether buckets without any gradient are not sent
        self._skipped: set[int] = set()  # parameters of such buckets in this pass
        self._accumulated: set[int] = set()  # parameters that got gradients in passes that did not synchronize
        self.others_ready = False  # whether a gradient that is in no bucket became ready in this pass
        self.moments: dict[str, int] = {}

    @property
    def rebuilt(self) -> bool:
        """Whether the buckets have got their final order."""
        return self._order is None

    def unused(self) -> dict[str, nn.Parameter]:
        """The parameters, by name, that got no gradient in the latest backward pass. (The module may have others in their place.)"""
        named = zip(self.names, self.parameters, self._remaining, strict=False)
        return {name: parameter for name, parameter, remaining in named if remaining > 0}

    def begin(self, *outputs: Node | None) -> None:
        self._leave_interrupted()
        if not self._running:
            self.others_ready, self.moments = False, {"backward": time.perf_counter_ns()}
            self._skipped.clear()
            for call in self.before_backward:
                call()
        super().begin(*outputs)

    def ready(self, index: int, *arguments: object) -> None:
        if not self.expecting:
            self._accumulated.add(index)
        super().ready(index, *arguments)

    def start(self, bucket: Bucket) -> None:
        self.moments.setdefault("all-reduce", time.perf_counter_ns())
        super().start(bucket)

    def _send(self) -> None:
        bucket = self.buckets[len(self.sent)]
        if self.skip_unused and not any(map(self._has_gradient, bucket.parameters)):
            self._skipped.update(bucket.parameters)
            self.sent.append(_Skipped())
        else:
            super()._send()

    def _has_gradient(self, index: int) -> bool:
        return self._remaining[index] <= 0 or index in self._accumulated

    def agree_on_receivers(self, used: list[bool]) -> set[int]:
        return super().agree_on_receivers(used) - self._skipped

    def _finish(self) -> None:
        self.moments["computed"] = time.perf_counter_ns()
        super()._finish()
        # The lesson's reducer still expects a pass if none of its gradients became ready.
        if not self.expecting or self.others_ready:
            self.expecting = False
            self._accumulated.clear()
            for call in self.after_backward:
                call()
            self.moments["end"] = time.perf_counter_ns()
        else:
            for call in self.after_none:
                call()


class _Skipped:
    def wait(self) -> None:
        pass
