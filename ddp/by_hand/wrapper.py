"""DistributedDataParallel by hand: a drop-in for torch's, in Python that can be read.

    model = HandwrittenDistributedDataParallel(network)
    model(inputs).sum().backward()  # .grad is now the average over the ranks

    torchrun --nproc_per_node=2 -m ddp.train --strategy handwritten

The wrapper is what surrounds a backward pass; the reducer, below, what happens in it. Messages are in ddp/by_hand/buckets.py; how they
are summed, in ddp/all_reduce/algorithms.py. See torch/nn/parallel/distributed.py, torch/csrc/distributed/c10d/reducer.cpp and Li et al.,
"PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (VLDB 2020, arXiv 2006.15704).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_map_only

from ddp.all_reduce.algorithms import AllReduce, Backend, Pending
from ddp.all_reduce.p2p import P2P
from ddp.by_hand.buckets import DEFAULT_LIMITS, MIB, Bucket, GradBucket, Hook, HookedAverage, Kind, assign_buckets
from ddp.by_hand.join import UnevenInputs
from ddp.by_hand.outputs import tensors_in
from ddp.by_hand.replicas import broadcast, replicated, require_same_modules


class HandwrittenDistributedDataParallel(UnevenInputs, nn.Module):
    """Averages the gradients of ``module`` over the ranks in every backward pass. (To copy or pickle it, take ``module``.)

    :param module: the same on every rank; its parameters must not change their number, shapes or ``requires_grad`` afterwards
    :param device_ids: the GPU that inputs are moved to; None leaves them where they are
    :param process_group: the default group when None
    :param bucket_cap_mb: MiB of a full bucket; None takes 1 for the first and 25 for all others
    :param broadcast_buffers: send rank 0's buffers (BatchNorm's statistics) to all before each forward pass
    :param find_unused_parameters: for modules that do not use all parameters in every forward pass: those contribute zeros
    :param gradient_as_bucket_view: let ``.grad`` be a view into its bucket, which saves a copy. (torch's default is False.)
    :param static_graph: every forward pass uses the same parameters the same number of times, whichever the first does
    :param all_reduce: sums the buckets; the group's own backend when None
    :raises ValueError: on every rank, if the modules differ; if nothing is to be trained; for a bucket size of 0 or less
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        all_reduce: AllReduce | None = None,
    ) -> None:
        super().__init__()
        group = process_group or dist.distributed_c10d._get_default_group()
        settings: dict[str, Any] = {"bucket_cap_mb": bucket_cap_mb, "broadcast_buffers": broadcast_buffers}
        settings |= {"find_unused_parameters": find_unused_parameters, "static_graph": static_graph}
        require_same_modules(module, settings | {"all_reduce": type(all_reduce).__name__}, group)
        tensors = replicated(module)
        trained = {name: t for name, t in tensors.items() if isinstance(t, nn.Parameter) and t.requires_grad}
        if not trained:
            raise ValueError(f"{type(module).__name__} has no parameter to train: there are no gradients to average")
        if bucket_cap_mb is not None and bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb} must be above 0")
        self.module, self.process_group, self.device_ids = module, group, device_ids
        self.device = next(iter(trained.values())).device
        if device_ids is not None and [getattr(i, "index", i) for i in device_ids] != [self.device.index]:
            raise ValueError(f"device_ids={list(device_ids)} must name the module's GPU, but it is on {self.device}")
        self.broadcast_buffers, self.gradient_as_bucket_view = broadcast_buffers, gradient_as_bucket_view
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.require_backward_grad_sync = True  # what no_sync turns off
        self.require_forward_param_sync = True  # whether the buffers may differ: not after a pass without gradients
        limits = DEFAULT_LIMITS if bucket_cap_mb is None else [int(bucket_cap_mb * MIB)]
        broadcast(list(tensors.values()), 0, group)
        all_reduce = all_reduce or Backend(P2P(group))
        self.reducer = Reducer(
            trained, group, all_reduce, limits, gradient_as_bucket_view, find_unused_parameters, static_graph
        )
        ready = [functools.partial(self.reducer.ready, index) for index in range(len(trained))]
        hooks = [p.register_post_accumulate_grad_hook(r) for p, r in zip(trained.values(), ready, strict=True)]
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])  # the parameters may outlive this wrapper

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """``module``'s forward; what it returns knows whether its backward pass will synchronize."""
        synchronize = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.announce_forward(synchronize)
        if self.device_ids is not None:
            inputs, kwargs = tree_map_only(Tensor, lambda t: t.to(self.device, non_blocking=True), (inputs, kwargs))
        output = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self._prepare_for_backward(output, synchronize)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block in which forward passes are recorded whose backward passes keep their gradients to this rank."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Let ``hook(state, bucket)`` average each :class:`ddp.by_hand.buckets.GradBucket` instead; torch's own will do."""
        if not callable(hook):
            raise TypeError(f"a communication hook is a function of (state, bucket), not {type(hook).__name__}")
        if self.reducer.hook is not None:
            raise RuntimeError("there is a communication hook already: register one, before the first backward pass")
        self.reducer.hook = functools.partial(HookedAverage, hook, state)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _prepare_for_backward(self, output: Any, synchronize: bool) -> None:
        self.reducer.prepare_for_backward(synchronize)
        # The backward pass announces itself at the output; that of a loss which is kept elsewhere, with its first gradient.
        for tensor in tensors_in(output) if synchronize else ():
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self.reducer.begin())


class Reducer:
    """From "this gradient is ready" to "every gradient is the average", in every backward pass that is expected.

    A bucket that is complete is sent at once, while backward goes on with the layers before: communication hides behind
    computation. Buckets are sent in the same order on every rank, since collectives are matched by their order.

    :param parameters: by name, in the same order on all ranks; :param limits: see :func:`ddp.by_hand.buckets.assign_buckets`
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
        self._as_view, self._find_unused = as_view, find_unused and not static_graph
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
        self._divisor = 1 if self.hook else self.divisor  # hooks divide themselves
        for bucket in self.buckets:
            bucket.missing, bucket.waiting = bucket.uses, set(bucket.parameters)
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
        if not bucket.small:
            bucket.copy_in(index, self._divisor)  # at once, since its memory is what the next gradient wants
        bucket.missing -= 1
        while not bucket.missing and len(self._sent) < len(self.buckets) and self.buckets[len(self._sent)].missing == 0:
            self._send()

    def prepare_for_backward(self, synchronize: bool) -> None:
        """There was a forward pass, and the backward pass that follows is to be synchronized or not."""
        in_backward = torch._C._current_graph_task_id() != -1  # a checkpoint's forward pass
        if self._running and not in_backward:  # an exception has ended that one, and autograd never announced its end
            self._wait()
            self._running = False
        self.expecting = synchronize or (in_backward and self.expecting)

    def join_backward(self) -> None:
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
        bucket = self.buckets[index]
        bucket.buffer.zero_() if zeros else bucket.fill(self._divisor)
        if self.hook is None:
            self._sent.append(self._all_reduce.start(bucket.buffer))
        else:
            self._sent.append(self.hook(GradBucket(bucket, index, is_last=index == len(self.buckets) - 1)))

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
            bucket.finalize(receivers)
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
        averages = {index: view.clone() for bucket in self.buckets for index, view in bucket.views.items()}
        self._build_buckets(order.tolist())
        for bucket in self.buckets:
            for index, view in bucket.views.items():
                view.copy_(averages[index])

    def _build_buckets(self, order: Iterable[int]) -> None:
        indices = {self._parameters[index]: index for index in order}
        free = dict(self._memory)
        self.buckets: list[Bucket] = []
        for parameters in assign_buckets(indices, self._limits):
            kind = (parameters[0].dtype, parameters[0].device)
            size = sum(parameter.numel() for parameter in parameters)
            buffer, free[kind] = free[kind][:size], free[kind][size:]
            bucket = Bucket({indices[parameter]: parameter for parameter in parameters}, buffer, self._as_view)
            bucket.uses = sum(self._uses[index] > 0 for index in bucket.parameters) if self._uses else 0
            self.buckets.append(bucket)
        self._bucket_of = {index: bucket for bucket in self.buckets for index in bucket.parameters}
