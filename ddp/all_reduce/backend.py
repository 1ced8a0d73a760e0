"""The process group's own all-reduce, which the hand-written DDP uses unless it is given another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddp.all_reduce.base import AllReduce, Pending

Watch = Callable[[], contextlib.AbstractContextManager[Any]]


class Backend(AllReduce):
    """``dist.all_reduce``: over TCP with gloo, over NVLink or the network with NCCL.

    :param group: the default group when None
    :param watch: makes a context in which each sum is awaited, which may turn an error into one that names the lost rank
    """

    def __init__(self, group: dist.ProcessGroup | None = None, watch: Watch = contextlib.nullcontext) -> None:
        super().__init__()
        self._group, self._watch = group, watch

    def run(self, buffer: Tensor) -> None:
        self.start(buffer).wait()

    def start(self, buffer: Tensor) -> Pending:
        return _InBackend(dist.all_reduce(buffer, group=self._group, async_op=True), self._watch)


class _InBackend:
    def __init__(self, work: dist.Work | None, watch: Watch) -> None:
        self._work, self._watch = work, watch

    def wait(self) -> None:
        assert self._work is not None
        with self._watch():
            self._work.wait()
