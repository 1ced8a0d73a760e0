"""All-reduces that compute in Python: what was started runs in a thread, in the order of its start, the same on every rank."""

from __future__ import annotations

import abc
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from torch import Tensor

from ddp.all_reduce.base import AllReduce, Pending, require_flat
from ddp.all_reduce.sharded import ShardedAllReduce


class InThread(AllReduce):
    """One thread runs all that was started, as those of torch's process groups do."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="all-reduce")
        self._latest: list[Future[None]] = []  # what was started last

    def share(self, buffer: Tensor) -> bool:
        """Move a tensor that has a storage of its own, with its views, to where it is summed without a copy.

        A collective; no sum may be running.

        :returns: the same on all ranks: False if there is too little memory, which the sum will do without
        """
        return True

    def unshare(self, buffer: Tensor) -> None:
        """Forget a tensor that was given to :meth:`share`, on all ranks alike. It stays where it is."""

    @abc.abstractmethod
    def _sum(self, buffer: Tensor) -> None:
        """The algorithm."""

    def run(self, buffer: Tensor) -> None:
        require_flat(buffer)
        wait(self._latest)
        self._sum(buffer)

    def start(self, buffer: Tensor) -> Pending:
        require_flat(buffer)
        return self._begin(self._sum, buffer)

    def _begin(self, collective: Callable[[Tensor], None], buffer: Tensor) -> Pending:
        self._latest = [self._thread.submit(collective, buffer)]
        return PendingInThread(self._latest[0])

    def close(self) -> None:
        self._thread.shutdown()


class ShardedInThread(InThread, ShardedAllReduce):
    """Its reduce-scatter and all-gather run in that thread, too. Called directly, they must find nothing started there."""

    def start_reduce_scatter(self, buffer: Tensor) -> Pending:
        return self._begin(self.reduce_scatter, buffer)

    def start_all_gather(self, buffer: Tensor) -> Pending:
        return self._begin(self.all_gather, buffer)


class PendingInThread:
    """A sum in the thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()
