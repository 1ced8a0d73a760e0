"""The reducer: averages the buckets of gradients during the backward pass.

A complete bucket is sent at once, while backward goes on with the layers below: communication hides behind computation. Buckets
are sent in the same order on every rank: collectives are matched by their order. See torch/csrc/distributed/c10d/reducer.cpp.

1. After each forward pass, the wrapper (wrapper.py) calls ``prepare_for_backward``.
2. When backward reaches a tensor that forward returned, a hook there calls ``begin_at``.
3. At each parameter's gradient, a hook calls ``ready``.
4. When the pass is over, autograd calls ``_finish``.
"""

from __future__ import annotations

import enum
import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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
from ddp.by_hand.replicas import in_backward, within_another_pass


class Phase(enum.Enum):
    """Whether a backward pass runs or is expected, and whether it averages."""

    NONE_EXPECTED = "no pass is expected"
    LOCAL = "the next is under no_sync"
    EXPECTED = "the next averages"
    RUNNING = "one that averages runs"


@dataclass
class BackwardPass:
    """A backward pass that averages.

    :param times_ready: how often each gradient became ready in it
    :param div_factor: gradients are divided by this before they are summed
    :param end: refers to the function that autograd calls when the pass is over. Autograd alone holds that function: if an exception
        ends the pass, it is freed, and ``end()`` is None
    :param from_output: how the pass was noticed. True: by a hook that the wrapper has put on a tensor that forward returned;
        False: only by the first gradient, since the loss was stored elsewhere
    :param reaches_parameters: whether an output in this pass depends on a parameter. Found out with find_unused only; otherwise True
    :param sent: the all-reduces of the first buckets
    """

    times_ready: list[int]
    div_factor: float
    end: weakref.ref[Any]
    from_output: bool
    reaches_parameters: bool
    sent: list[Pending]


_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()  # to notice two wrappers of one parameter


class Reducer:
    """From "this gradient is ready" to "every gradient is the average", in every backward pass that synchronizes.

    :param module: only for error messages: if parameters get no gradient, it is searched for others that have taken their places
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
        # A proxy: autograd's hooks hold this reducer, which would keep the module alive.
        self._module: nn.Module = weakref.proxy(module)  # type: ignore[assignment]
        self._names, self.parameters = list(parameters), list(parameters.values())
        self.ids = set(map(id, self.parameters))
        # The nodes of autograd's graph that put gradients into .grad. If a later .to() gives a parameter another node, our hooks are
        # not on it, and _finish says so.
        self.nodes = [get_gradient_edge(p).node for p in self.parameters]
        self.group, self._all_reduce, self._limits = group, all_reduce, limits
        self._as_view, self.find_unused = as_view, find_unused and not static_graph
        self.div_factor = float(group.size())  # of the next backward pass
        # Takes the place of the all-reduce: called with a bucket, its index, and whether it is the last.
        self.comm_hook: Callable[[Bucket, int, bool], Pending] | None = None

        sizes: Counter[Kind] = Counter()
        for parameter in self.parameters:
            sizes[parameter.dtype, parameter.device] += parameter.numel()
        self.memory = {kind: all_reduce.allocate(size, *kind) for kind, size in sizes.items()}

        indices = range(len(self.parameters))
        # The order in which gradients become ready in the first backward pass. None after that pass: the buckets have been rebuilt.
        self._order: list[int] | None = []
        # How often each gets ready per pass: 1; with static_graph, as seen in the first pass (None until then).
        self._expected_times: list[int] | None = None if static_graph else [1 for _ in indices]
        # The indices of parameters that have a gradient on any rank. None: the ranks ask each other at the end of a pass (with
        # find_unused of each, with static_graph of the first).
        self._used_anywhere = None if static_graph or find_unused else set(indices)
        self._build_buckets(reversed(indices))  # a first guess: backward begins with the last layer

        self.phase = Phase.NONE_EXPECTED
        self._pass: BackwardPass  # the latest one; absent before the first ``begin``

    def prepare_for_backward(self, synchronize: bool) -> None:
        """A forward pass is over. ``synchronize`` says whether the backward pass that follows averages the gradients."""
        self._leave_interrupted()
        # Activation checkpointing repeats forward passes in backward, perhaps before the first gradient is ready. They decide nothing.
        if self.phase is Phase.RUNNING or (self.phase is Phase.EXPECTED and in_backward()):
            return
        self.phase = Phase.EXPECTED if synchronize else Phase.LOCAL

    def begin_at(self, output: Node | None) -> None:
        """Backward has come to an output of forward, before any gradient of a parameter.

        :param output: its node of the graph; None while compiled autograd traces
        :raises RuntimeError: if two wrappers would replace each other's gradients by views into their own buckets
        """
        if output is None:
            raise NotImplementedError(errors.COMPILED_AUTOGRAD)
        self._begin(from_output=True)
        # For _finish, if no gradient comes in this pass. If the output depends on a parameter, the user called torch.autograd.grad:
        # nothing to average. If it does not, this rank has used no parameter, and sends zeros: other ranks may have gradients.
        self._pass.reaches_parameters = self._pass.reaches_parameters or depend_on([output], self.ids)

    def _begin(self, from_output: bool) -> None:
        """A pass that averages, if none runs yet. :meth:`_finish` ends it."""
        self._leave_interrupted()
        if self.phase is Phase.RUNNING:
            return
        self._refuse_shared_views()
        _reducers.add(self)
        end = functools.partial(self._finish)  # a new object, which autograd alone holds: see goes_on()
        # HACK: nothing public tells when a pass ends, and torch's DDP uses this too. If torch renames it: AttributeError.
        Variable._execution_engine.queue_callback(end)
        self._pass = BackwardPass(
            times_ready=[0 for _ in self.parameters],
            div_factor=1.0 if self.comm_hook else self.div_factor,  # communication hooks divide by themselves
            end=weakref.ref(end),
            from_output=from_output,
            reaches_parameters=not self.find_unused,
            sent=[],
        )
        for bucket in self.buckets:
            bucket.to_copy = set(bucket.parameters)  # whose gradients are not in its buffer yet
            # Gradients still to wait for. With static_graph, unused parameters get none.
            bucket.missing = sum(self._expected_times is None or self._expected_times[i] > 0 for i in bucket.parameters)
        self.phase = Phase.RUNNING

    def ready(self, index: int, *_: object) -> None:
        """Autograd is done with parameter ``index``: its gradient, if it has one, is in ``.grad``.

        :raises RuntimeError: if it became ready before in this pass, or is sparse
        """
        if not self.goes_on() and not self._begin_if_expected():
            return
        if self._order is not None:
            self._order.append(index)
        times_ready, expected = self._pass.times_ready, self._expected_times
        times_ready[index] += 1
        # With static_graph, the first pass (expected is None) only counts how often each becomes ready, and _finish sends. Later, a
        # parameter that two reentrant checkpoints share becomes ready twice: wait for the last time.
        if expected is None or times_ready[index] < expected[index]:
            return
        if times_ready[index] > expected[index]:
            raise errors.ready_twice(self._names[index])
        bucket = self._bucket_of[index]
        if not bucket.copies_together:
            bucket.copy_in(index, self._pass.div_factor)  # now, so that its old memory is free for the next gradient
        bucket.missing -= 1
        if not bucket.missing:
            self._send()

    def _begin_if_expected(self) -> bool:
        """At a gradient without a running pass: begin one, or return False if this gradient is not averaged."""
        if self.phase is Phase.LOCAL:
            return False
        if self.phase is Phase.NONE_EXPECTED:
            if not self._others_of_this_pass():  # no other wrapper of this parameter averages it
                warnings.warn(errors.WITHOUT_FORWARD, stacklevel=1)
            return False
        self._begin(from_output=False)
        return True

    def goes_on(self) -> bool:
        """Whether a backward pass that averages is running, and no exception has ended it: then autograd has dropped its ``end``."""
        return self.phase is Phase.RUNNING and self._pass.end() is not None

    def _send(self, also_incomplete: bool = False) -> None:
        """Send the complete buckets at the queue's front. (Collectives are matched by their order.)"""
        for bucket in self.buckets[len(self._pass.sent) :]:
            if bucket.missing and not also_incomplete:
                return
            bucket.fill(self._pass.div_factor)
            self._pass.sent.append(self.start(len(self._pass.sent)))

    def start(self, index: int) -> Pending:
        """Start the all-reduce of a bucket."""
        bucket = self.buckets[index]
        if self.comm_hook is None:
            return self._all_reduce.start(bucket.buffer)
        return self.comm_hook(bucket, index, bucket is self.buckets[-1])

    def _wait(self) -> None:
        for pending in self._pass.sent:
            pending.wait()

    def _finish(self) -> None:
        """Backward is over: send the remaining buckets, wait for all, and make the averages the gradients.

        :raises RuntimeError: if not all gradients can be averages
        """
        self.phase = Phase.EXPECTED  # stays so if this returns or raises before the end: backward may run again
        times_ready = self._pass.times_ready
        expected = self._expected_times or times_ready  # static_graph: as often as in the first pass
        missing = [self._names[index] for index, times in enumerate(expected) if times_ready[index] < times]
        none_ready = not any(times_ready)
        replaced = errors.if_replaced(self._module, self._names, self.nodes) if none_ready or missing else None
        # The loss depends on parameters, but none got a gradient: the user called torch.autograd.grad. A backward pass may follow.
        if none_ready and self._pass.reaches_parameters and not replaced:
            return
        if error := self._error(replaced, missing):
            self._wait()
            self.phase = Phase.NONE_EXPECTED
            raise error
        self._send(also_incomplete=True)
        self._wait()
        self._expected_times = expected
        used = self.agree_on_used([p.grad is not None for p in self.parameters])
        self.rebuild_buckets()
        for bucket in self.buckets:
            bucket.set_grads(used)
        self.phase = Phase.NONE_EXPECTED

    def agree_on_used(self, used: list[bool]) -> set[int]:
        """The parameters that have a gradient on any rank. The others keep ``.grad`` None, as in torch's DDP."""
        if self._used_anywhere is not None:
            return self._used_anywhere
        flags = torch.tensor(used, dtype=torch.int32, device=self.parameters[0].device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        anywhere = set(flags.nonzero().flatten().tolist())
        if not self.find_unused:  # with static_graph, they stay the same
            self._used_anywhere = anywhere
        return anywhere

    def rebuild_buckets(self) -> None:
        """After the first backward pass: group gradients that become ready together, in rank 0's order."""
        if self._order is None:
            return
        # Each index once, where it comes first. Parameters without a gradient come last.
        indices = dict.fromkeys([*self._order, *reversed(range(len(self.parameters)))])
        order = torch.tensor(list(indices), device=self.parameters[0].device)
        dist.broadcast(order, group=self.group, group_src=0)
        self._order = None
        # Same memory, new order: copy out, rebuild, copy in.
        averages = {index: view.clone() for bucket in self.buckets for index, view in bucket.views.items()}
        had_view = [index for bucket in self.buckets for index in filter(bucket.contains_grad, bucket.parameters)]
        self._build_buckets(order.tolist())
        for index, average in averages.items():
            self._bucket_of[index].views[index].copy_(average)
        for index in had_view:  # their .grad is a view into an old bucket
            self._bucket_of[index].set_grad_views([index])

    def _build_buckets(self, order: Iterable[int]) -> None:
        index_of = {self.parameters[index]: index for index in order}
        unassigned = dict(self.memory)
        self.buckets: list[Bucket] = []
        for parameters in assign_buckets(index_of, self._limits):
            kind = (parameters[0].dtype, parameters[0].device)
            size = sum(parameter.numel() for parameter in parameters)
            # The bucket's buffer is cut off the front; the rest is for later buckets.
            buffer, unassigned[kind] = unassigned[kind].tensor_split([size])
            self.buckets.append(Bucket({index_of[p]: p for p in parameters}, buffer, self._as_view))
        self._bucket_of = {index: bucket for bucket in self.buckets for index in bucket.parameters}

    # The rare cases: a pass that an exception interrupted, two wrappers of one parameter, a pass within another one, and errors.

    def _leave_interrupted(self) -> None:
        """If an exception has ended the backward pass, wait for what was sent. Another backward pass may follow."""
        if self.phase is Phase.RUNNING and not self.goes_on():
            self.phase = Phase.EXPECTED  # set before wait(), which may raise again
            self._wait()
            for bucket in self.buckets[: len(self._pass.sent)]:
                bucket.drop()  # a late sum may have been written into a .grad that the user has zeroed

    def _others_of_this_pass(self) -> list[Reducer]:
        """Reducers of other wrappers that have some of the same parameters and whose backward pass is running."""
        return [one for one in _reducers if one is not self and one.goes_on() and not one.ids.isdisjoint(self.ids)]

    def _refuse_shared_views(self) -> None:
        others = self._others_of_this_pass()
        if others and (self._as_view or any(other._as_view for other in others)):
            raise RuntimeError(errors.TWO_WRAPPERS)

    def _error(self, replaced: RuntimeError | None, missing: list[str]) -> RuntimeError | None:
        """The reason why not all gradients can be averages; None if they can."""
        # No output's hook noticed this pass, and another one still runs around it: it is the inner pass of a reentrant checkpoint,
        # which sees only some of the gradients.
        if not self._pass.from_output and within_another_pass():
            return RuntimeError(errors.UNKNOWN_BEGINNING)
        if replaced or self.find_unused or not missing:
            return replaced
        return errors.unused(missing, len(self._names))
