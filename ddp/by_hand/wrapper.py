"""DistributedDataParallel by hand: a drop-in for torch's, in Python that can be read.

    model = HandwrittenDistributedDataParallel(network)
    model(inputs).sum().backward()  # .grad is now the average over the ranks

    torchrun --nproc_per_node=2 -m ddp.train --strategy handwritten

The wrapper is what surrounds a backward pass; ddp/by_hand/reducer.py is what happens in it. Gradients are grouped in
ddp/by_hand/buckets.py and summed in ddp/all_reduce/. See torch/nn/parallel/distributed.py and Li et al., "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training" (VLDB 2020, arXiv 2006.15704).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ddp.all_reduce.backend import Backend
from ddp.all_reduce.base import AllReduce
from ddp.by_hand.buckets import DEFAULT_LIMITS, MIB
from ddp.by_hand.comm_hook import Hook, HookedAverage
from ddp.by_hand.join import JoinableDDP
from ddp.by_hand.outputs import tensors_in
from ddp.by_hand.reducer import Reducer
from ddp.by_hand.replicas import broadcast, replicated, require_same_modules


class HandwrittenDistributedDataParallel(JoinableDDP, nn.Module):
    """Averages the gradients of ``module`` over the ranks in every backward pass. (To copy or pickle it, take ``module``.)

    :param module: the same on every rank; its parameters must not change their number, shapes or ``requires_grad`` afterwards
    :param device_ids: the GPU that inputs are moved to; None leaves them where they are
    :param process_group: the default group when None
    :param bucket_cap_mb: MiB of a full bucket; None takes 1 for the first and 25 for all others
    :param broadcast_buffers: send rank 0's buffers (BatchNorm's statistics) to all before each forward pass
    :param find_unused_parameters: for modules that do not use all parameters in every forward pass; the unused ones
        contribute zeros
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
        self.require_forward_param_sync = True  # False after a pass without gradients: the buffers are still equal
        limits = DEFAULT_LIMITS if bucket_cap_mb is None else [int(bucket_cap_mb * MIB)]
        broadcast(list(tensors.values()), 0, group)
        all_reduce = all_reduce or Backend(group)
        self.reducer = Reducer(
            trained, group, all_reduce, limits, gradient_as_bucket_view, find_unused_parameters, static_graph
        )
        # Autograd calls these hooks when the gradient of a parameter is in .grad.
        ready = [functools.partial(self.reducer.ready, index) for index in range(len(trained))]
        hooks = [p.register_post_accumulate_grad_hook(r) for p, r in zip(trained.values(), ready, strict=True)]
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])  # the parameters may outlive this wrapper

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """``module``'s forward. It is decided here whether the backward pass from the output will synchronize."""
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
        """Within this block, forward passes lead to backward passes that add to ``.grad`` on this rank alone."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Let ``hook(state, bucket)`` average each :class:`ddp.by_hand.comm_hook.GradBucket` instead; torch's own hooks work too."""
        if not callable(hook):
            raise TypeError(f"a communication hook is a function of (state, bucket), not {type(hook).__name__}")
        if self.reducer.hook is not None:
            raise RuntimeError("there is a communication hook already: register one, before the first backward pass")
        self.reducer.hook = functools.partial(HookedAverage, hook, state)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _prepare_for_backward(self, output: Any, synchronize: bool) -> None:
        self.reducer.prepare_for_backward(synchronize)
        # The backward pass begins at an output. If the loss was stored elsewhere, it begins for us with the first gradient.
        for tensor in tensors_in(output) if synchronize else ():
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self.reducer.begin())
