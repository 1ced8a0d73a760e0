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
    :param end: tells whether an exception has ended the pass: then ``end()`` is None. It is a weak reference to the function that
        autograd calls when the pass is over. Only autograd keeps that function alive, and frees it after an exception
    :param from_output: True if a hook on one of forward's outputs noticed the pass when it began. False if its first gradient did,
        since the loss was not computed from what forward returned (the module may have stored it)
    :param reaches_parameters: False if find_unused has found that the outputs at which the pass begins depend on no parameter
    :param sent: ``sent[i]`` is the all-reduce of ``buckets[i]``; shorter than ``buckets`` until all are sent
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

    :param module: only for an error message. If parameters get no gradient, the module tells whether others have replaced them
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
        # The nodes of autograd's graph that put gradients into .grad. The wrapper hooks each of them. A later module.to() may give a
        # parameter another node, without a hook. Then errors.if_replaced sees that the nodes differ.
        self.nodes = [get_gradient_edge(p).node for p in self.parameters]
        self.group, self._all_reduce, self._limits = group, all_reduce, limits
        self._as_view, self.find_unused = as_view, find_unused and not static_graph
        # For the next backward pass; join.py lowers it when other ranks have no batches left.
        self.div_factor = float(group.size())
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
        # The indices of parameters that have a gradient on any rank. None if only a collective can tell: with find_unused the ranks
        # ask each other at the end of every pass, with static_graph at the end of the first.
        self._used_anywhere = None if static_graph or find_unused else set(indices)
        self._build_buckets(reversed(indices))  # a first guess: backward begins with the last layer

        self.phase = Phase.NONE_EXPECTED
        self._pass: BackwardPass  # the latest one; absent before the first one

    def prepare_for_backward(self, synchronize: bool) -> None:
        """A forward pass is over. ``synchronize`` says whether the backward pass that follows averages the gradients."""
        self._leave_interrupted()
        # Activation checkpointing repeats forward passes within backward. They decide nothing if that backward pass averages. (It may
        # still be EXPECTED, since it is RUNNING only from a hook of an output or the first gradient on.)
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
        # Two kinds of passes bring no gradient, and _finish must tell them apart. If the user called torch.autograd.grad, the output
        # depends on parameters, but no .grad is written: nothing is averaged. If this rank has used no parameter, the output depends on
        # none: the rank sends zeros, since others may have gradients. (The second kind is allowed with find_unused only.)
        self._pass.reaches_parameters = self._pass.reaches_parameters or depend_on([output], self.ids)

    def _begin(self, from_output: bool) -> None:
        """Begin a pass that averages, if none runs yet. :meth:`_finish` ends it."""
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
            # The indices of the parameters whose gradients are not in its buffer yet.
            bucket.to_copy = set(bucket.parameters)
            # The number of gradients to wait for: all, or with static_graph those that came in the first pass.
            bucket.missing = sum(self._expected_times is None or self._expected_times[i] > 0 for i in bucket.parameters)
        self.phase = Phase.RUNNING

    def ready(self, index: int, *_: object) -> None:
        """Autograd is done with parameter ``index``: its gradient is in ``.grad``, or a function of the user's gave none.

        :raises RuntimeError: if it became ready before in this pass; if it is sparse (``Bucket.copy_in`` raises)
        """
        if not self.goes_on() and not self._begin_if_expected():
            return  # no pass that averages runs, and none begins here
        if self._order is not None:
            self._order.append(index)
        times_ready, expected = self._pass.times_ready, self._expected_times
        times_ready[index] += 1
        # With static_graph, the first pass only counts (expected is None), and _finish sends all buckets. In later passes, a gradient
        # may become ready several times, if several reentrant checkpoints use the parameter. It is complete the last time.
        if expected is None or times_ready[index] < expected[index]:
            return
        if times_ready[index] > expected[index]:
            raise errors.ready_twice(self._names[index])
        bucket = self._bucket_of[index]
        if not bucket.copies_together:
            # After the copy, autograd can use the gradient's own memory for the next one. (A bucket that copies_together is copied by
            # fill(), when it is complete.)
            bucket.copy_in(index, self._pass.div_factor)
        bucket.missing -= 1
        if not bucket.missing:
            self._send()

    def _begin_if_expected(self) -> bool:
        """At a gradient without a running pass: begin one, or return False if this gradient is not averaged."""
        if self.phase is Phase.LOCAL:
            return False
        if self.phase is Phase.NONE_EXPECTED:
            # The parameter may have two wrappers, of which the other one averages in this pass. If there is none, warn.
            if not self._others_of_this_pass():
                warnings.warn(errors.WITHOUT_FORWARD, stacklevel=1)
            return False
        self._begin(from_output=False)
        return True

    def goes_on(self) -> bool:
        """Whether a backward pass that averages still runs. If an exception has ended it, its ``end()`` is None."""
        return self.phase is Phase.RUNNING and self._pass.end() is not None

    def _send(self, also_incomplete: bool = False) -> None:
        """Send buckets in their order, up to the first that is not complete. (Collectives are matched by their order.)"""
        for bucket in self.buckets[len(self._pass.sent) :]:  # those that are not sent yet
            if bucket.missing and not also_incomplete:
                return
            bucket.fill(self._pass.div_factor)
            self._pass.sent.append(self.start(len(self._pass.sent)))

    def start(self, index: int) -> Pending:
        """Start the all-reduce of a bucket. (A rank without batches calls this, too, see join.py; and the next two public methods.)"""
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
        self.phase = Phase.EXPECTED  # the phase if this returns early, or a collective fails: backward may run again
        times_ready = self._pass.times_ready
        # In the first pass with static_graph, the gradients that came are those to expect, and none is missing.
        expected = self._expected_times or times_ready
        missing = [self._names[index] for index, times in enumerate(expected) if times_ready[index] < times]
        none_ready = not any(times_ready)
        replaced = errors.if_replaced(self._module, self._names, self.nodes) if none_ready or missing else None
        # The user called torch.autograd.grad, see begin_at. A backward pass may follow.
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
        # The parameters whose .grad is a view into an old bucket. (Others have no .grad, or one with memory of its own.)
        had_view = [index for bucket in self.buckets for index in filter(bucket.contains_grad, bucket.parameters)]
        self._build_buckets(order.tolist())
        for index, average in averages.items():
            self._bucket_of[index].views[index].copy_(average)
        for index in had_view:  # it becomes a view into the new bucket
            self._bucket_of[index].set_grad_views([index])

    def _build_buckets(self, order: Iterable[int]) -> None:
        index_of = {self.parameters[index]: index for index in order}  # a dict keeps its order
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
                # A .grad that lies in the bucket may hold a late sum now, although the user zeroed it after the exception.
                bucket.drop()

    def _others_of_this_pass(self) -> list[Reducer]:
        """Reducers of other wrappers that have some of the same parameters and whose backward pass is running."""
        return [one for one in _reducers if one is not self and one.goes_on() and not one.ids.isdisjoint(self.ids)]

    def _refuse_shared_views(self) -> None:
        others = self._others_of_this_pass()
        if others and (self._as_view or any(other._as_view for other in others)):
            raise RuntimeError(errors.TWO_WRAPPERS)

    def _error(self, replaced: RuntimeError | None, missing: list[str]) -> RuntimeError | None:
        """The reason why not all gradients can be averages; None if they can."""
        # A reentrant checkpoint runs a backward pass of its own within the whole one. If no hook of an output has noticed the whole
        # pass, the one that ends here may be the checkpoint's, which brings only some of the gradients.
        if not self._pass.from_output and within_another_pass():
            return RuntimeError(errors.UNKNOWN_BEGINNING)
        if missing and not (replaced or self.find_unused):
            return errors.unused(missing, len(self._names))
        return replaced
