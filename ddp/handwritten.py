"""DistributedDataParallel by hand: a drop-in for torch's, in Python that can be read.

    model = HandwrittenDistributedDataParallel(network)
    model(inputs).sum().backward()  # .grad is now the average over the ranks

    torchrun --nproc_per_node=2 -m ddp.train --strategy handwritten

Here is what surrounds the backward pass, which is in ddp/reducer.py, its messages in ddp/buckets.py, and how these are summed
in ddp/allreduce.py. It follows torch/nn/parallel/distributed.py and Li et al., "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training" (VLDB 2020, arXiv 2006.15704).
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
from torch.utils._pytree import tree_leaves, tree_map_only

from ddp.allreduce import AllReduce, Backend
from ddp.buckets import DEFAULT_LIMITS, MIB, Hook, HookedAverage
from ddp.peers import Peers
from ddp.reducer import Reducer
from ddp.replicas import broadcast, replicated, require_same_modules
from ddp.uneven import UnevenInputs


class HandwrittenDistributedDataParallel(UnevenInputs, nn.Module):
    """Averages the gradients of ``module`` over the ranks in every backward pass.

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
        settings = {"find_unused_parameters": find_unused_parameters, "static_graph": static_graph}
        require_same_modules(module, settings | {"bucket_cap_mb": bucket_cap_mb, "all_reduce": type(all_reduce)}, group)
        tensors = replicated(module)
        trained = {name: t for name, t in tensors.items() if isinstance(t, nn.Parameter) and t.requires_grad}
        if not trained:
            raise ValueError(f"{type(module).__name__} has no parameter to train: there are no gradients to average")
        if bucket_cap_mb is not None and bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb} must be above 0")
        if device_ids is not None and len(device_ids) != 1:
            raise ValueError(f"device_ids={list(device_ids)} must name one GPU, this rank's own")
        self.module, self.process_group, self.device_ids = module, group, device_ids
        self.device = next(iter(trained.values())).device
        self.broadcast_buffers, self.gradient_as_bucket_view = broadcast_buffers, gradient_as_bucket_view
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.require_backward_grad_sync = True  # what no_sync turns off
        self.require_forward_param_sync = True  # whether the buffers may differ: not after a pass without gradients

        limits = DEFAULT_LIMITS if bucket_cap_mb is None else [int(bucket_cap_mb * MIB)]
        broadcast(list(tensors.values()), 0, group)
        all_reduce = all_reduce or Backend(Peers(group))
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
            self._expect_backward(output, synchronize)
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
        """Let ``hook(state, bucket)`` average each :class:`ddp.buckets.GradBucket` instead; torch's own will do."""
        if not callable(hook):
            raise TypeError(f"a communication hook is a function of (state, bucket), not {type(hook).__name__}")
        if self.reducer.hook is not None:
            raise RuntimeError("there is a communication hook already: register one, before the first backward pass")
        self.reducer.hook = functools.partial(HookedAverage, hook, state)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _expect_backward(self, output: Any, synchronize: bool) -> None:
        self.reducer.expect(synchronize)
        # The backward pass announces itself where it begins, at the output (whose graph keeps this wrapper alive). One of a
        # loss that is kept elsewhere, as an attribute of the module, does so with its first gradient.
        for tensor in tree_leaves(output) if synchronize else []:
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self.reducer.begin())
