"""DistributedDataParallel by hand, in Python that can be read.

    model = HandwrittenDistributedDataParallel(network)
    model(inputs).sum().backward()  # .grad is now the average over the ranks

    torchrun --nproc_per_node=2 -m ddp.train --strategy handwritten

The wrapper is what surrounds a backward pass; ddp/by_hand/reducer.py is what happens in it. Gradients are grouped in
ddp/by_hand/buckets.py and summed in ddp/all_reduce/. See torch/nn/parallel/distributed.py and Li et al., "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training" (VLDB 2020, arXiv 2006.15704). For ranks with different numbers of batches, see
join.py.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ddp.all_reduce.base import AllReduce
from ddp.by_hand import errors, replicas
from ddp.by_hand.buckets import DEFAULT_LIMITS, MIB
from ddp.by_hand.outputs import tensors_in
from ddp.by_hand.reducer import Phase, Reducer

if TYPE_CHECKING:
    from ddp.by_hand.comm_hook import Hook


class HandwrittenDistributedDataParallel(nn.Module):
    """Averages the gradients of ``module`` over the ranks in every backward pass. (To copy or pickle it, take ``module``.)

    :param module: the same on every rank; its parameters must not change their number, shapes or ``requires_grad`` afterwards
    :param device_ids: the GPU that inputs are moved to; None leaves them where they are
    :param process_group: the default group when None
    :param bucket_cap_mb: MiB of a full bucket; None takes 1 for the first and 25 for all others
    :param broadcast_buffers: send rank 0's buffers (BatchNorm's statistics) to all before each forward pass
    :param find_unused_parameters: for modules that do not use all parameters in every forward pass; the unused ones
        contribute zeros, or what else is in their ``.grad``
    :param gradient_as_bucket_view: let ``.grad`` be a view into its bucket, which saves a copy. (torch's default is False.)
    :param static_graph: every forward pass uses the same parameters the same number of times, whichever the first does
    :param all_reduce: sums the buckets; the group's own backend when None
    :raises RuntimeError: on every rank, if the modules differ; if nothing is to be trained
    :raises ValueError: for another device than the module's
    :raises NotImplementedError: for tensors that cannot be sent, for optimizers that step within backward
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
        self.module, self.broadcast_buffers = module, broadcast_buffers
        self.process_group = cast("dist.ProcessGroup", process_group or dist.group.WORLD)
        self.require_backward_grad_sync = True  # no_sync turns this off
        self.require_forward_param_sync = True  # False after a forward pass that does not synchronize
        settings = {
            "bucket_cap_mb": bucket_cap_mb,
            "broadcast_buffers": broadcast_buffers,
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "all_reduce": type(all_reduce).__name__,
        }
        replicas.make_equal(module, settings, self.process_group, broadcast_buffers)
        trained = replicas.trained_parameters(module)
        if not trained:
            raise RuntimeError(
                f"{type(module).__name__} has no parameter to train: DistributedDataParallel is not needed"
            )
        self.device, self.device_ids = next(iter(trained.values())).device, list(device_ids or [])
        if self.device_ids and [getattr(i, "index", i) for i in self.device_ids] != [self.device.index]:
            raise ValueError(f"device_ids={device_ids} must name the module's GPU, but it is on {self.device}")
        bucket_limits = DEFAULT_LIMITS if bucket_cap_mb is None else [int(bucket_cap_mb * MIB)]
        if all_reduce is None:
            from ddp.all_reduce.backend import Backend  # imported only if used, like all algorithms

            all_reduce = Backend(self.process_group)
        options = (bucket_limits, gradient_as_bucket_view, find_unused_parameters, static_graph)
        self.reducer = Reducer(module, trained, self.process_group, all_reduce, *options)
        self._frozen = [p for p in replicas.replicated(module, buffers=False).values() if not p.requires_grad]
        self._register_hooks()

    def _register_hooks(self) -> None:
        """Tell the reducer of every gradient that is ready, and prepare the hook of outputs."""
        reducer = self.reducer  # the hooks hold it, and not this wrapper
        self._begin_backward = lambda _: reducer.begin_at(replicas.current_node())
        # The node that puts a gradient into .grad calls its hook last, also after those that users register later.
        for index, node in enumerate(reducer.nodes):
            hook = node.register_hook(functools.partial(reducer.ready, index))
            # This wrapper and its outputs hold ``_begin_backward``. When all are gone, the hooks go too.
            weakref.finalize(self._begin_backward, hook.remove)
        replicas.refuse_early_steps(
            self, reducer.ids, lambda: replicas.in_backward() and reducer.phase is not Phase.NONE_EXPECTED
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """``module``'s forward. It decides whether the backward pass from the output will synchronize."""
        synchronize = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.prepare_for_forward(synchronize)
        if self.device_ids:
            inputs, kwargs = tree_map_only(Tensor, lambda t: t.to(self.device, non_blocking=True), (inputs, kwargs))
        output = self.module(*inputs, **kwargs)
        self._prepare_for_backward(output, synchronize)
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def prepare_for_forward(self, synchronize: bool) -> None:
        """Before a forward pass: send the buffers to all ranks, if an optimizer step lies between this pass and the last.

        :param synchronize: whether the backward pass will average the gradients
        """
        if self.broadcast_buffers and self.require_forward_param_sync:
            self.synchronize_buffers()

    def synchronize_buffers(self) -> None:
        """Send the buffers of rank 0 to all ranks."""
        replicas.broadcast_buffers(self.module, 0, self.process_group)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this block, forward passes lead to backward passes that add to ``.grad`` on this rank alone."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _prepare_for_backward(self, output: Any, synchronize: bool) -> None:
        # Only now: a forward pass that raised changes nothing, as in torch's DDP.
        self.require_forward_param_sync = synchronize
        if not torch.is_grad_enabled():
            return
        if synchronize and self.process_group.size() > 1 and any(p.requires_grad for p in self._frozen):
            raise RuntimeError(errors.UNFROZEN)
        self.reducer.prepare_for_backward(synchronize)
        if not synchronize:
            return
        # An output's hook announces the backward pass. If the loss was stored elsewhere, the first gradient does.
        for tensor in tensors_in(output):
            # A view that is changed in place gets another grad_fn; its base keeps its own.
            for one in (tensor, tensor._base):
                if one is not None and one.grad_fn is not None:
                    one.register_hook(self._begin_backward)

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Let ``hook(state, bucket)`` average the buckets, see :func:`ddp.by_hand.comm_hook.register`."""
        from ddp.by_hand import comm_hook

        comm_hook.register(self.reducer, state, hook)

    def join(self, *_: Any, **__: Any) -> NoReturn:
        """:raises NotImplementedError: here"""
        raise NotImplementedError("join is not offered here: use ddp.by_hand.JoinableDistributedDataParallel")

    join_hook: Any = join  # for torch's Join([model])
