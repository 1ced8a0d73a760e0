"""The reducer: averages the buckets of gradients during the backward pass.

A complete bucket is sent at once, while backward goes on with the layers below: communication hides behind computation. Buckets
are sent in the same order on every rank: collectives are matched by their order. See torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge

from ddp.all_reduce.base import AllReduce, Pending
from ddp.by_hand import errors, running
from ddp.by_hand.buckets import Bucket, Kind, assign_buckets
from ddp.by_hand.outputs import depend_on


class Reducer:
    """From "this gradient is ready" to "every gradient is the average", in every backward pass that synchronizes.

    :param module: the parameters are looked for in it, after a backward pass that gave them no gradient
    :param parameters: by name, in the same order on all ranks
    :param group: the ranks that train together
    :param all_reduce: sums a bucket
    :param limits: see :func:`ddp.by_hand.buckets.assign_buckets`
    :param as_view, find_unused, static_graph: the wrapper's gradient_as_bucket_view, find_unused_parameters and static_graph
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        all_reduce: AllReduce,
        limits: list[int],
        as_view: bool,
        find_unused: bool,
        static_graph: bool,
    ) -> None:
        # Whether a backward pass that synchronizes is running or follows. None: no forward pass leads to one of any kind.
        self.expecting: bool | None = None
        # Gradients are divided by this before they are summed: in the next backward pass, and in the running one.
        self.div_factor = self._div_factor_now = float(group.size())
        self.hook: Callable[[Bucket, int, bool], Pending] | None = None  # averages a bucket in another way
        # A proxy: autograd holds the hooks, they hold this, and the module may hold its wrapper.
        self.module: nn.Module = weakref.proxy(module)  # type: ignore[assignment]
        self.names, self.parameters = list(parameters), list(parameters.values())
        self._group, self._all_reduce, self._limits = group, all_reduce, limits
        self.as_view, self._find_unused = as_view, find_unused and not static_graph
        # The nodes that put gradients into .grad. (A parameter that is converted gets another one.)
        self.ids, self.nodes = set(map(id, self.parameters)), [get_gradient_edge(p).node for p in self.parameters]
        indices = range(len(self.parameters))
        sizes: Counter[Kind] = Counter()
        for parameter in self.parameters:
            sizes[parameter.dtype, parameter.device] += parameter.numel()
        self.memory = {kind: all_reduce.allocate(size, *kind) for kind, size in sizes.items()}
        # The order in which gradients become ready in the first backward pass; None afterwards.
        self._order: list[int] | None = [] if parameters else None
        # How often each gradient becomes ready in a backward pass. The first pass of a static graph counts.
        self._counting, self._uses = static_graph, [0 if static_graph else 1 for _ in indices]
        # The parameters that have a gradient on any rank; None if the ranks have to agree on them.
        self._receivers = None if parameters and (static_graph or find_unused) else set(indices)
        self._build_buckets(reversed(indices))  # a first guess: backward begins with the last layer
        # The running backward pass: whether it began from an output that depends on any parameter, how often each gradient will
        # still become ready, the sent all-reduces, its number, and a reference to its end that dies with it in an exception.
        self._running = self._depends = False
        self._remaining, self.sent = list[int](), list[Pending]()
        self._task, self._end = -1, weakref.ref(self._finish)

    def begin(self, *outputs: Node | None) -> None:
        """A backward pass that synchronizes begins from ``outputs``, or goes on. Autograd calls :meth:`_finish` when it is over."""
        self._leave_interrupted()
        if None in outputs:  # no node is running: autograd traces the pass, and will not call its end
            raise NotImplementedError(errors.COMPILED_AUTOGRAD)
        if not self._running:
            running.enter(self, is_whole=bool(outputs))
            self._running, self.expecting, self._depends = True, True, False
            self._remaining, self.sent = list(self._uses), []
            self._div_factor_now = 1 if self.hook else self.div_factor  # communication hooks divide by themselves
            for bucket in self.buckets:
                bucket.missing, bucket.to_copy = sum(self._uses[i] for i in bucket.parameters), set(bucket.parameters)
            end = functools.partial(self._finish)  # autograd alone holds it, and drops it after an exception
            self._task, self._end = torch._C._current_graph_task_id(), weakref.ref(end)
            Variable._execution_engine.queue_callback(end)
        if self._find_unused and not self._depends:
            self._depends = depend_on(outputs, self.ids)

    def ready(self, index: int, *_: object) -> None:
        """The gradient of parameter ``index`` is in ``.grad``, or there is none.

        :raises RuntimeError: if it became ready before in this pass, or after its end, or is sparse
        """
        if not self.expecting:
            if 0 <= torch._C._current_graph_task_id() < self._task:  # a pass around the one that has been averaged
                raise RuntimeError(errors.UNKNOWN_BEGINNING)
            if self.expecting is None and not running.sharing(self):
                warnings.warn(errors.WITHOUT_FORWARD, stacklevel=1)
            return
        if not self.goes_on():
            self.begin()
        if self._order is not None:
            self._order.append(index)
        self._remaining[index] -= 1
        if self._counting or self._remaining[index] > 0:
            return
        if self._remaining[index] < 0:
            raise errors.ready_twice(self.names[index])
        bucket = self._bucket_of[index]
        if not bucket.together:
            bucket.copy_in(index, self._div_factor_now)  # at once: the next gradient can then reuse its memory
        bucket.missing -= 1
        # Collectives are matched by their order, so a complete bucket waits for those before it.
        while not bucket.missing and len(self.sent) < len(self.buckets) and self.buckets[len(self.sent)].missing == 0:
            self._send()

    def prepare_for_backward(self, synchronize: bool) -> None:
        """A forward pass is over. ``synchronize`` says whether the backward pass that follows averages the gradients."""
        self._leave_interrupted()
        in_backward = torch._C._current_graph_task_id() != -1  # activation checkpointing runs forward within backward
        self.expecting = synchronize or (in_backward and self.expecting)

    def goes_on(self) -> bool:
        """Whether a backward pass is running, and no exception has ended it."""
        return self._running and self._end() is not None

    def _leave_interrupted(self) -> None:
        if self._running and not self.goes_on():
            self._running = False  # first: to wait may raise what ended the pass
            self.wait()
            for bucket in self.buckets[: len(self.sent)]:
                bucket.drop()  # the sums came into these gradients when they may have been zero again

    def _send(self) -> None:
        bucket = self.buckets[len(self.sent)]
        bucket.fill(self._div_factor_now)
        self.start(bucket)

    def start(self, bucket: Bucket) -> None:
        """Start the all-reduce of the next bucket."""
        if self.hook is None:
            self.sent.append(self._all_reduce.start(bucket.buffer))
        else:
            self.sent.append(self.hook(bucket, len(self.sent), bucket is self.buckets[-1]))

    def wait(self) -> None:
        """Return when all started all-reduces are over."""
        for pending in self.sent:
            pending.wait()

    def _finish(self) -> None:
        """Backward is over: send the remaining buckets, wait for all, and make the averages the gradients."""
        self._running = False
        none_ready, missing = self._remaining == self._uses, max(self._remaining, default=0) > 0
        error = errors.changed(self.module, self.names, self.nodes) if none_ready or missing else None
        if none_ready and not error and (not self._find_unused or self._depends):
            return  # this was torch.autograd.grad, which leaves .grad unchanged
        if error or (missing and not self._find_unused):
            self.wait()
            self.expecting = False
            raise error or errors.unused(self.names, self._remaining)
        while len(self.sent) < len(self.buckets):
            self._send()
        self.wait()
        if self._counting:
            self._counting, self._uses = False, [-remaining for remaining in self._remaining]
        receivers = self.agree_on_receivers([p.grad is not None for p in self.parameters])
        self.rebuild_buckets()
        for bucket in self.buckets:
            bucket.finalize(receivers)
        self.expecting = None

    def agree_on_receivers(self, used: list[bool]) -> set[int]:
        """The parameters that have a gradient on any rank. The others keep ``.grad`` None, as in torch's DDP."""
        if self._receivers is not None:
            return self._receivers
        flags = torch.tensor(used, dtype=torch.int32, device=self.parameters[0].device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        receivers = set(flags.nonzero().flatten().tolist())
        self._receivers = None if self._find_unused else receivers  # those of a static graph stay the same
        return receivers

    def rebuild_buckets(self) -> None:
        """After the first backward pass: group gradients that become ready together, in rank 0's order."""
        if self._order is None:
            return
        never = reversed(range(len(self.parameters)))
        order = torch.tensor(list(dict.fromkeys([*self._order, *never])), device=self.parameters[0].device)
        dist.broadcast(order, group=self._group, group_src=0)
        self._order = None
        # All buckets share one buffer per dtype, in which the new order gives each average another place.
        averages = {index: view.clone() for bucket in self.buckets for index, view in bucket.views.items()}
        gradients = [index for bucket in self.buckets for index in filter(bucket.holds, bucket.parameters)]
        self._build_buckets(order.tolist())
        for index, average in averages.items():
            self._bucket_of[index].views[index].copy_(average)
        for index in gradients:
            self._bucket_of[index].install([index])

    def _build_buckets(self, order: Iterable[int]) -> None:
        indices = {self.parameters[index]: index for index in order}
        free = dict(self.memory)
        self.buckets: list[Bucket] = []
        for parameters in assign_buckets(indices, self._limits):
            kind = (parameters[0].dtype, parameters[0].device)
            size = sum(parameter.numel() for parameter in parameters)
            buffer, free[kind] = free[kind][:size], free[kind][size:]
            self.buckets.append(Bucket({indices[p]: p for p in parameters}, buffer, self.as_view))
        self._bucket_of = {index: bucket for bucket in self.buckets for index in bucket.parameters}
