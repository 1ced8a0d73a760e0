"""torch's DistributedDataParallel, argument for argument and method for method, on top of the one that is written to be read.

    from ddp.by_hand import DistributedDataParallel  # instead of torch.nn.parallel

Everything here is layered around :class:`ddp.by_hand.wrapper.HandwrittenDistributedDataParallel`. Where it differs
from torch on purpose, ddp/conformance/differences/README.md shows each case with its smallest program.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp.all_reduce.backend import Backend
from ddp.all_reduce.base import AllReduce
from ddp.by_hand import comm_hook
from ddp.by_hand.buckets import MIB
from ddp.by_hand.drop_in import in_backward
from ddp.by_hand.drop_in.delayed import DelayedAverage
from ddp.by_hand.drop_in.logging_data import LoggingDDP
from ddp.by_hand.drop_in.mixed_precision import MixedPrecision, averaged_in, call_in, cast_buffers
from ddp.by_hand.drop_in.reducer import DropInReducer
from ddp.by_hand.drop_in.requirements import (
    group_of,
    require_copies_when_nested,
    require_wrappable,
)
from ddp.by_hand.drop_in.sparse import SparseAverage, sparse_parameters
from ddp.by_hand.replicas import make_equal, trained_parameters


@TorchDDP.register  # so that isinstance() holds, by which torch.distributed.checkpoint and others recognize a wrapper
class DistributedDataParallel(LoggingDDP):
    """A drop-in for ``torch.nn.parallel.DistributedDataParallel``, whose documentation holds for every argument but these:

    :param dim: not used, as in torch's
    :param broadcast_buffers: not deprecated here; ``forward_sync_buffers`` takes precedence
    :param lazy_bucket_allocation: refused: buckets live as long as the wrapper
    :param batched_grad_copy: of no effect: small gradients are always copied together, and on GPUs all of a bucket
    :param delay_all_reduce_named_params: their all-reduce is awaited by the end of backward, and left out under ``no_sync``
    :param mixed_precision: works on a CPU too
    :raises RuntimeError, ValueError: where torch's does, before anything is sent, or on all ranks
    :raises NotImplementedError: for what is refused
    """

    reducer_type = DropInReducer
    reducer: DropInReducer

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Iterable[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: MixedPrecision | None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
    ) -> None:
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise ValueError("pass delay_all_reduce_named_params and param_to_hook_all_reduce together, or neither")
        delayed = dict(delay_all_reduce_named_params or ())
        if any(parameter is param_to_hook_all_reduce for parameter in delayed.values()):
            raise ValueError(
                "param_to_hook_all_reduce is delayed itself: name a parameter whose gradient is ready after theirs"
            )
        if lazy_bucket_allocation:
            raise NotImplementedError("lazy_bucket_allocation: buckets live as long as this wrapper; pass False")
        if check_reduction:
            warnings.warn("check_reduction is deprecated and does nothing; leave it out", FutureWarning, stacklevel=2)
        if device_mesh is not None:
            process_group = group_of(device_mesh, process_group)
        require_wrappable(module, device_ids, output_device)
        require_copies_when_nested(module, gradient_as_bucket_view)
        self.output_device, self.device_mesh = output_device, device_mesh
        self.mixed_precision, self.skip_all_reduce_unused_params = mixed_precision, skip_all_reduce_unused_params
        self._init_sync = init_sync
        self._sync_buffers_at_first = forward_sync_buffers is not None or broadcast_buffers is not False
        self._limits = [int(size * MIB) for size in bucket_cap_mb_list or ()]
        self._delayed_parameters = delayed
        self._trigger = (param_to_hook_all_reduce,)  # in a tuple, as it is no parameter of this module
        self._delayed: DelayedAverage | None = None
        self._sparse: SparseAverage | None = None
        self._fused: list[nn.Parameter] | None = None  # parameters whose optimizers step within backward
        super().__init__(
            module,
            device_ids,
            process_group,
            bucket_cap_mb,
            broadcast_buffers is not False if forward_sync_buffers is None else forward_sync_buffers,
            find_unused_parameters,
            gradient_as_bucket_view,
            static_graph,
        )
        if mixed_precision is not None:
            cast_buffers(module, mixed_precision)

    # Construction

    def make_replicas_equal(self, settings: dict[str, Any]) -> None:
        if self._init_sync:
            more = {"bucket_cap_mb_list": self._limits, "delay_all_reduce_named_params": list(self._delayed_parameters)}
            more |= {"skip_all_reduce_unused_params": self.skip_all_reduce_unused_params}
            make_equal(self.module, settings | more, self.process_group, self._sync_buffers_at_first)

    def build_reducer(self, trained: dict[str, nn.Parameter], all_reduce: AllReduce) -> None:
        self.bucket_limits = self._limits or self.bucket_limits
        sparse = {name: trained[name] for name in trained if name in sparse_parameters(self.module)}
        if sparse and self.mixed_precision is not None:
            raise NotImplementedError(
                "mixed_precision: torch has no sparse gradients of embeddings in another precision: use sparse=False or autocast"
            )
        buckets = {
            name: p for name, p in trained.items() if name not in self._delayed_parameters and name not in sparse
        }
        super().build_reducer(buckets, all_reduce)
        self.reducer.skip_unused = self.skip_all_reduce_unused_params
        if sparse:
            self._sparse = SparseAverage(sparse, self.process_group, self.reducer)
        if self._trigger[0] is not None and self._delayed_parameters:
            self._delayed = DelayedAverage(self._delayed_parameters, self._trigger[0], self.process_group, self.reducer)
        for part in (self._sparse, self._delayed):
            for hook in part.hooks if part is not None else ():
                self._hooks.append(hook)
                weakref.finalize(self.begin_backward, hook.remove)
        if self.mixed_precision is not None:
            comm_hook.register(self.reducer, None, averaged_in(self.mixed_precision, self.process_group))
        self_or_none = weakref.ref(self)  # the parameters' hooks hold the reducer, which must not hold this wrapper
        self.reducer.after_backward.append(lambda: DistributedDataParallel._after_backward(self_or_none()))

    def _rebuild_reducer(self) -> None:
        self._remove_autograd_hooks()
        hook = self.reducer.hook
        self.build_reducer(trained_parameters(self.module), Backend(self.process_group))
        if self.mixed_precision is None:  # else there is a new one, of the present group
            self.reducer.hook = hook

    def _remove_autograd_hooks(self) -> None:
        """From now on, backward passes average nothing."""
        for hook in self._hooks:
            hook.remove()

    def _set_static_graph(self) -> None:
        """As ``static_graph=True``; before the first backward pass.

        :raises RuntimeError: after it
        """
        if self.static_graph:
            warnings.warn("static_graph is True already", stacklevel=2)
            return
        if self.reducer.passes:
            raise RuntimeError(
                "_set_static_graph() should be called before training loop starts: pass static_graph=True"
            )
        self.static_graph = True
        self._rebuild_reducer()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Train on with other ranks."""
        self.process_group = new_process_group
        self._rebuild_reducer()

    # Leaves parameters and buffers, by name, to each rank; before wrapping.
    _set_params_and_buffers_to_ignore_for_model = staticmethod(TorchDDP._set_params_and_buffers_to_ignore_for_model)

    # A step

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """``module``'s forward; a backward pass from what it returns averages the gradients."""
        if self._fused is None:
            self._fused = in_backward.take_over(trained_parameters(self.module).values())
        output = super().forward(*inputs, **kwargs)
        self.synchronize_buffers_after_forward()
        return output

    def run_module(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.mixed_precision is None:
            return self.module(*inputs, **kwargs)
        return call_in(self.mixed_precision, self.module, inputs, kwargs)

    @staticmethod
    def _after_backward(wrapper: DistributedDataParallel | None) -> None:
        if wrapper is not None:
            wrapper.await_buffers()
            in_backward.step(wrapper._fused or ())

    def _check_reducer_finalized(self) -> None:
        """:raises RuntimeError: if the latest backward pass was not completed"""
        if self.reducer._running:
            raise RuntimeError("the latest backward pass ended with an error, so its gradients are not averages")

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether rank 0's buffers are sent before each forward pass."""
        return self.broadcast_buffers

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self.broadcast_buffers = value

    @property
    def require_manual_backward_finalization(self) -> bool:
        """False: backward always ends with the averages in place."""
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            raise NotImplementedError(
                "require_manual_backward_finalization: backward always waits for the averages here"
            )

    # Hooks

    def register_comm_hook(self, state: object, hook: comm_hook.Hook) -> None:
        """See torch's."""
        if self._sparse is not None:
            raise NotImplementedError("a communication hook sees buckets alone, and sparse gradients are in none")
        super().register_comm_hook(state, hook)

    def join_hook(self, **settings: Any) -> JoinHook:
        if self._sparse is not None or self._delayed is not None:
            raise NotImplementedError(
                "join: a rank that has joined contributes zeros to buckets alone; sparse and delayed gradients are in none"
            )
        if self.skip_all_reduce_unused_params:
            raise NotImplementedError(
                "join: a rank that has joined contributes zeros to all buckets, since it does not know which ones the others "
                "skip: pass skip_all_reduce_unused_params=False"
            )
        return super().join_hook(**settings)

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.distributed_c10d._get_default_group():
            raise RuntimeError(
                "a wrapper is copied or pickled with the default process group alone: copy its module instead"
            )
        parts = {
            "process_group",
            "reducer",
            "begin_backward",
            "_hooks",
            "_frozen",
            "_sparse",
            "_delayed",
            "_fused",
        }
        return {name: value for name, value in self.__dict__.items() if name not in parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = dist.distributed_c10d._get_default_group()
        self._sparse, self._delayed, self._fused = None, None, None
        self.build_reducer(trained_parameters(self.module), Backend(self.process_group))
