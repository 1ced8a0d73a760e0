"""The reducer: averages the buckets of gradients during the backward pass.

A complete bucket is sent at once, while backward goes on with the layers below: communication hides behind computation. Buckets
are sent in the same order on every rank: collectives are matched by their order. See torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

import enum
import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge

from ddp.all_reduce.base import AllReduce, Pending
from ddp.by_hand import errors
from ddp.by_hand.buckets import Bucket, Kind, assign_buckets
from ddp.by_hand.outputs import depend_on


class Phase(enum.Enum):
    """Which backward pass the next gradient belongs to."""

    NO_FORWARD = "none of this wrapper: there was no forward pass, or its gradients are averaged already"
    LOCAL = "one under no_sync, which adds to .grad on this rank alone"
    EXPECTED = "one that averages and has not begun"
    RUNNING = "one that averages and is running"


@dataclass
class BackwardPass:
    """A backward pass that averages.

    :param times_ready: how often each gradient became ready in it
    :param div_factor: gradients are divided by this before they are summed
    :param end: the function that autograd calls when the pass is over; it is gone when an exception has ended the pass
    :param from_output: whether the pass began at an output of forward; otherwise it began for us with the first gradient
    :param depends: whether such an output depends on any parameter; looked for if parameters may be unused
    :param sent: the all-reduces of the first buckets
    """

    times_ready: list[int]
    div_factor: float
    end: weakref.ref[Any]
    from_output: bool
    depends: bool = False
    sent: list[Pending] = field(default_factory=list)


_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()  # those that had a backward pass


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
        # A proxy: autograd holds the hooks, they hold this, and the module may hold its wrapper.
        self._module: nn.Module = weakref.proxy(module)  # type: ignore[assignment]
        self._names, self.parameters = list(parameters), list(parameters.values())
        self._ids = set(map(id, self.parameters))
        # The nodes that put gradients into .grad. (A parameter that is converted gets another one.)
        self.nodes = [get_gradient_edge(p).node for p in self.parameters]
        self._group, self._all_reduce, self._limits = group, all_reduce, limits
        self._as_view, self._find_unused = as_view, find_unused and not static_graph
        self.div_factor = float(group.size())  # of the next backward pass
        self.hook: Callable[[Bucket, int, bool], Pending] | None = None  # averages a bucket in another way

        sizes: Counter[Kind] = Counter()
        for parameter in self.parameters:
            sizes[parameter.dtype, parameter.device] += parameter.numel()
        self.memory = {kind: all_reduce.allocate(size, *kind) for kind, size in sizes.items()}

        indices = range(len(self.parameters))
        # The order in which gradients became ready in the first backward pass; None when the buckets follow it.
        self._order: list[int] | None = []
        # How often each gradient becomes ready in a backward pass. The first pass of a static graph counts: None until then.
        self._uses: list[int] | None = None if static_graph else [1 for _ in indices]
        # The parameters that have a gradient on any rank; None if the ranks have to agree on them.
        self._receivers = None if static_graph or find_unused else set(indices)
        self._build_buckets(reversed(indices))  # a first guess: backward begins with the last layer

        self.phase = Phase.NO_FORWARD
        self._pass: BackwardPass  # the latest one; ``begin`` sets it

    def prepare_for_backward(self, synchronize: bool) -> None:
        """A forward pass is over. ``synchronize`` says whether the backward pass that follows averages the gradients."""
        self._leave_interrupted()
        if self.phase is Phase.RUNNING:
            return  # activation checkpointing runs forward again within the backward pass
        in_backward = torch._C._current_graph_task_id() != -1  # the same, before the first gradient
        expected = synchronize or (in_backward and self.phase is Phase.EXPECTED)
        self.phase = Phase.EXPECTED if expected else Phase.LOCAL

    def begin(self, *outputs: Node | None) -> None:
        """A backward pass that averages begins, or goes on. Autograd calls :meth:`_finish` when it is over.

        :param outputs: the node of an output of forward, if the pass has come to one
        :raises RuntimeError: if two wrappers would replace each other's gradients by views into their own buckets
        """
        self._leave_interrupted()
        if None in outputs:  # no node is running: autograd traces the pass, and will not call its end
            raise NotImplementedError(errors.COMPILED_AUTOGRAD)
        if self.phase is not Phase.RUNNING:
            if any(other._as_view or self._as_view for other in self._others_of_this_pass()):
                raise RuntimeError(errors.TWO_WRAPPERS)
            _reducers.add(self)
            end = functools.partial(self._finish)  # autograd alone holds it, and drops it after an exception
            Variable._execution_engine.queue_callback(end)
            # Communication hooks divide by themselves.
            div_factor = 1.0 if self.hook else self.div_factor
            self._pass = BackwardPass([0 for _ in self.parameters], div_factor, weakref.ref(end), bool(outputs))
            for bucket in self.buckets:
                bucket.to_copy = set(bucket.parameters)
                bucket.missing = sum(self._uses is None or self._uses[index] > 0 for index in bucket.parameters)
            self.phase = Phase.RUNNING
        if self._find_unused and not self._pass.depends:
            self._pass.depends = depend_on(outputs, self._ids)

    def ready(self, index: int, *_: object) -> None:
        """The gradient of parameter ``index`` is in ``.grad``, or there is none.

        :raises RuntimeError: if it became ready before in this pass, or is sparse
        """
        if not self.goes_on():
            if self.phase is Phase.LOCAL:
                return
            if self.phase is Phase.NO_FORWARD:
                if not self._others_of_this_pass():
                    warnings.warn(errors.WITHOUT_FORWARD, stacklevel=1)
                return
            self.begin()
        if self._order is not None:
            self._order.append(index)
        times_ready, sent = self._pass.times_ready, self._pass.sent
        times_ready[index] += 1
        # A reentrant checkpoint accumulates the gradient of a parameter by itself: one that is used in two is ready twice.
        if self._uses is None or times_ready[index] < self._uses[index]:
            return
        if times_ready[index] > self._uses[index]:
            raise errors.ready_twice(self._names[index])
        bucket = self._bucket_of[index]
        if not bucket.together:
            bucket.copy_in(index, self._pass.div_factor)  # at once: the next gradient can then reuse its memory
        bucket.missing -= 1
        # Collectives are matched by their order, so a complete bucket waits for those before it.
        while not bucket.missing and len(sent) < len(self.buckets) and self.buckets[len(sent)].missing == 0:
            self._send()

    def goes_on(self) -> bool:
        """Whether a backward pass that averages is running, and no exception has ended it."""
        return self.phase is Phase.RUNNING and self._pass.end() is not None

    def _others_of_this_pass(self) -> list[Reducer]:
        """Reducers of other wrappers that have some of the same parameters and whose backward pass is running."""
        return [one for one in _reducers if one is not self and one.goes_on() and not one._ids.isdisjoint(self._ids)]

    def _leave_interrupted(self) -> None:
        """If an exception has ended the backward pass, wait for what was sent. Another backward pass may follow."""
        if self.phase is Phase.RUNNING and not self.goes_on():
            self.phase = Phase.EXPECTED  # first: to wait may raise what ended the pass
            self._wait()
            for bucket in self.buckets[: len(self._pass.sent)]:
                bucket.drop()  # the sums came into these gradients when they may have been zero again

    def _send(self) -> None:
        index = len(self._pass.sent)
        self.buckets[index].fill(self._pass.div_factor)
        self._pass.sent.append(self.start(index))

    def start(self, index: int) -> Pending:
        """Start the all-reduce of a bucket."""
        bucket = self.buckets[index]
        if self.hook is None:
            return self._all_reduce.start(bucket.buffer)
        return self.hook(bucket, index, bucket is self.buckets[-1])

    def _wait(self) -> None:
        for pending in self._pass.sent:
            pending.wait()

    def _finish(self) -> None:
        """Backward is over: send the remaining buckets, wait for all, and make the averages the gradients.

        :raises RuntimeError: if not all gradients can be averages
        """
        self.phase = Phase.EXPECTED  # until the averages are there: after an error, the pass may be repeated
        none_ready = not any(self._pass.times_ready)
        missing = self._missing()
        error = errors.changed(self._module, self._names, self.nodes) if none_ready or missing else None
        if none_ready and not error and (not self._find_unused or self._pass.depends):
            return  # torch.autograd.grad leaves .grad unchanged
        # A node that runs now has started this pass, which is a part of its pass: a reentrant checkpoint does so.
        if not self._pass.from_output and torch._C._current_autograd_node() is not None:
            error = RuntimeError(errors.UNKNOWN_BEGINNING)
        if missing and not error and not self._find_unused:
            error = errors.unused(missing, len(self._names))
        if error:
            self._wait()
            self.phase = Phase.NO_FORWARD
            raise error
        while len(self._pass.sent) < len(self.buckets):
            self._send()
        self._wait()
        if self._uses is None:
            self._uses = self._pass.times_ready
        receivers = self.agree_on_receivers([p.grad is not None for p in self.parameters])
        self.rebuild_buckets()
        for bucket in self.buckets:
            bucket.finalize(receivers)
        self.phase = Phase.NO_FORWARD

    def _missing(self) -> list[str]:
        """The names of the parameters whose gradients have not become ready as often as expected."""
        if self._uses is None:
            return []
        counts = zip(self._names, self._pass.times_ready, self._uses, strict=True)
        return [name for name, times, expected in counts if times < expected]

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
            self.buckets.append(Bucket({indices[p]: p for p in parameters}, buffer, self._as_view))
        self._bucket_of = {index: bucket for bucket in self.buckets for index in bucket.parameters}
