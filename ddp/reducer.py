"""The reducer: from "this gradient is ready" to "every gradient is the average over the ranks".

It counts, while backward runs, which gradients are ready. A bucket that is complete is sent at once, while backward goes on
with the layers before; when backward is over, it waits for what still travels. So communication hides behind computation.
Buckets are sent in the same order on every rank, whatever becomes ready first there: collectives are matched by order. (The
same in C++: torch/csrc/distributed/c10d/reducer.cpp.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from ddp.allreduce import AllReduce, Pending
from ddp.buckets import Bucket, GradBucket, Kind, assign_buckets


class Reducer:
    """Averages the gradients of ``parameters`` in every backward pass that it is told to expect.

    :param parameters: by name, in the same order on all ranks
    :param limits: of the buckets, in bytes: see :func:`ddp.buckets.assign_buckets`
    :param as_view: and the others: see :class:`ddp.handwritten.HandwrittenDistributedDataParallel`
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        all_reduce: AllReduce,
        limits: list[int],
        as_view: bool,
        find_unused: bool,
        static_graph: bool,
    ) -> None:
        self.expecting = False  # a backward pass that is to be synchronized
        self.divisor: float = group.size()
        self.hook: Callable[[GradBucket], Pending] | None = None  # averages a bucket in another way
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._group, self._all_reduce, self._limits = group, all_reduce, limits
        self._as_view, self._find_unused = as_view, find_unused
        everyone = range(len(self._parameters))
        sizes: Counter[Kind] = Counter()
        for parameter in self._parameters:
            sizes[parameter.dtype, parameter.device] += parameter.numel()
        self._memory = {kind: all_reduce.allocate(size, *kind) for kind, size in sizes.items()}
        # The order in which gradients become ready, as the first backward pass shows it; None when it is over.
        self._order: list[int] | None = []
        # How often each gradient becomes ready in a backward pass; of a static graph, None until the first has shown it.
        self._uses: list[int] | None = None if static_graph else [1 for _ in everyone]
        # The parameters that have a gradient on any rank; None where that is to be found out.
        self._receivers = None if static_graph or find_unused else set(everyone)
        self._build_buckets(reversed(everyone))  # a guess: backward begins with the last layer
        # Of the backward pass that runs: how often each gradient has yet to become ready, and the buckets that are sent.
        self._running = False
        self._left: list[int] = []
        self._sent: list[Pending] = []

    def begin(self) -> None:
        """A backward pass begins that is to be synchronized; when all of it is over, autograd calls :meth:`_finish`."""
        if self._running:
            return
        self._running = self.expecting = True
        self._left, self._sent = list(self._uses or [0] * len(self._parameters)), []
        for bucket in self.buckets:
            bucket.missing = bucket.uses
        Variable._execution_engine.queue_callback(self._finish)

    def ready(self, index: int, _: object) -> None:
        """Parameter ``index``'s gradient is accumulated. :raises RuntimeError: if it was before, in this pass, or is sparse"""
        if not self.expecting:
            return
        self.begin()
        if self._order is not None:
            self._order.append(index)
        self._left[index] -= 1
        if self._uses is None or self._left[index] > 0:
            return
        if self._left[index] < 0:
            raise RuntimeError(
                f"the gradient of {self._names[index]} became ready twice in one backward pass: do several checkpoints use "
                "it? pass static_graph=True, or checkpoint with use_reentrant=False"
            )
        bucket = self._bucket_of[index]
        bucket.missing -= 1
        while not bucket.missing and len(self._sent) < len(self.buckets) and self.buckets[len(self._sent)].missing == 0:
            self._send()

    def expect(self, synchronize: bool) -> None:
        """There was a forward pass, and the backward pass that follows is to be synchronized or not."""
        in_backward = torch._C._current_graph_task_id() != -1  # a checkpoint's forward pass
        if self._running and not in_backward:  # an exception has ended that one, and autograd never announced its end
            self._wait()
            self._running = False
        self.expecting = synchronize or (in_backward and self.expecting)

    def shadow(self) -> None:
        """Do as the other ranks do in a backward pass, without one of one's own: contribute zeros."""
        self._sent = []
        for _ in self.buckets:
            self._send(zeros=True)
        self._wait()
        self._receivers or self._agree_on_receivers([False] * len(self._parameters))
        self._rebuild_buckets()

    def _send(self, zeros: bool = False) -> None:
        """Start the next bucket's all-reduce."""
        index = len(self._sent)
        bucket, is_last = self.buckets[index], index == len(self.buckets) - 1
        bucket.buffer.zero_() if zeros else bucket.fill(1 if self.hook else self.divisor)  # hooks divide themselves
        if self.hook is None:
            self._sent.append(self._all_reduce.start(bucket.buffer))
        else:
            self._sent.append(self.hook(GradBucket(bucket, index, is_last)))

    def _wait(self) -> None:
        for pending in self._sent:
            pending.wait()

    def _finish(self) -> None:
        """Backward is over: send what is left, wait for all, and hand out the averages."""
        self._running = False
        if not self._find_unused and self._left == (self._uses or [0] * len(self._left)):
            return  # not one became ready: this was torch.autograd.grad, which leaves .grad alone
        if not self._find_unused and max(self._left) > 0:
            self._wait()
            self.expecting = False
            untouched = [name for name, left in zip(self._names, self._left, strict=True) if left > 0]
            names = ", ".join(untouched[:5]) + ", ..." * (len(untouched) > 5)
            raise RuntimeError(
                f"backward gave no gradient to {len(untouched)} of {len(self._names)} parameters: {names}. This rank's loss "
                "does not depend on them: pass find_unused_parameters=True, or freeze them before wrapping"
            )
        while len(self._sent) < len(self.buckets):
            self._send()
        self._wait()
        if self._uses is None:
            self._uses = [-left for left in self._left]
        receivers = self._receivers or self._agree_on_receivers([p.grad is not None for p in self._parameters])
        self._rebuild_buckets()
        for bucket in self.buckets:
            bucket.hand_out(receivers)
        self.expecting = False

    def _agree_on_receivers(self, used: list[bool]) -> set[int]:
        """The parameters that get a gradient: those that have one on any rank. Where all have none, it stays None."""
        flags = torch.tensor(used, dtype=torch.int32, device=self._parameters[0].device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        receivers = set(flags.nonzero().flatten().tolist())
        if not self._find_unused:  # a static graph: once and for all
            self._receivers = receivers
        return receivers

    def _rebuild_buckets(self) -> None:
        """In the first backward pass: group gradients that become ready together, in rank 0's order."""
        if self._order is None:
            return
        never = reversed(range(len(self._parameters)))
        order = torch.tensor(list(dict.fromkeys([*self._order, *never])), device=self._parameters[0].device)
        dist.broadcast(order, group=self._group, group_src=0)
        self._order = None
        averages = {i: view.clone() for b in self.buckets for i, view in zip(b.indices, b.views, strict=True)}
        self._build_buckets(order.tolist())
        for bucket in self.buckets:
            for index, view in zip(bucket.indices, bucket.views, strict=True):
                view.copy_(averages[index])

    def _build_buckets(self, order: Iterable[int]) -> None:
        indices = {self._parameters[index]: index for index in order}
        free = dict(self._memory)
        self.buckets: list[Bucket] = []
        for parameters in assign_buckets(indices, self._limits):
            kind = (parameters[0].dtype, parameters[0].device)
            size = sum(parameter.numel() for parameter in parameters)
            buffer, free[kind] = free[kind][:size], free[kind][size:]
            self.buckets.append(Bucket([indices[p] for p in parameters], parameters, buffer, self._as_view))
        self._bucket_of = {index: bucket for bucket in self.buckets for index in bucket.indices}
        for bucket in self.buckets:
            bucket.uses = sum(self._uses[index] > 0 for index in bucket.indices) if self._uses else 0
