"""Wrappers that call hooks too early, too late, or with something else."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.ddp.conformance.mutant_bases import AtOnce, AverageEach, TorchDDP


class BeforeTensorHooks(AverageEach):
    """Sends what comes to its own tensor hook, which is the first."""

    def prepare(self) -> None:
        self.arrived: dict[Any, Tensor] = {}
        for parameter in self.trained:
            parameter.register_hook(functools.partial(self.keep, parameter))

    def keep(self, parameter: Any, gradient: Tensor) -> None:
        """A gradient comes to the hook."""
        self.arrived[parameter] = gradient.clone()

    def finish(self) -> None:
        for parameter, gradient in self.arrived.items():
            parameter.grad = gradient
        super().finish()


class CallsForward(TorchDDP):
    """Calls module.forward, as if that were the same."""

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module.forward(*inputs, **kwargs)


class _Changes(TorchDDP):
    """Calls the communication hook through :meth:`call`, in which something is changed."""

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        super().register_comm_hook(state, lambda state, bucket: self.call(hook, state, bucket))

    def call(self, hook: Any, state: Any, bucket: Any) -> Any:
        """Call the hook with its state and a bucket."""
        return hook(state, bucket)


class CallsTwice(_Changes):
    """Tries each hook before it counts."""

    def call(self, hook: Any, state: Any, bucket: Any) -> Any:
        hook(state, bucket).wait()
        return hook(state, bucket)


class DividesBefore(_Changes):
    """Divides before the hook, which divides again."""

    def call(self, hook: Any, state: Any, bucket: Any) -> Any:
        bucket.buffer().div_(dist.get_world_size())
        return hook(state, bucket)


class IgnoresTheResult(_Changes):
    """Averages the bucket, whatever the hook returns."""

    def call(self, hook: Any, state: Any, bucket: Any) -> Any:
        hook(state, bucket).wait()
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]


class TakesTheBuffer(_Changes):
    """Waits for the hook, and takes what is in the buffer."""

    def call(self, hook: Any, state: Any, bucket: Any) -> Any:
        return hook(state, bucket).then(lambda _: bucket.buffer())


class CopiesTheState(_Changes):
    """Gives each call a copy of the state."""

    def call(self, hook: Any, state: Any, bucket: Any) -> Any:
        return hook(dict(state), bucket)


class _Bucket:
    """A bucket as a hook sees it, with other methods in the place of some."""

    def __init__(self, bucket: Any, methods: dict[str, Any]) -> None:
        self._bucket, self._methods = bucket, methods

    def __getattr__(self, name: str) -> Any:
        if name in self._methods:
            return functools.partial(self._methods[name], self._bucket)
        return getattr(self._bucket, name)


def with_buckets(**methods: Any) -> Any:
    """A wrapper whose buckets have these methods, which are given the true bucket first."""

    class ChangesBuckets(_Changes):
        def call(self, hook: Any, state: Any, bucket: Any) -> Any:
            return hook(state, _Bucket(bucket, methods))

    return ChangesBuckets


class LastHookCounts(TorchDDP):
    """A second hook takes the place of the first, and what is no function that of none."""

    hook: Any = None

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        if self.hook is None:
            super().register_comm_hook(state, lambda state, bucket: self.hook(state, bucket))
        self.hook = hook


MUTANTS = {
    "hooks_of_parameters_run_before_the_average": BeforeTensorHooks,
    "accumulation_hooks_from_before_wrapping_run_before_the_average": BeforeTensorHooks,
    "accumulation_hooks_from_after_wrapping_run_before_the_average": AtOnce,
    "forward_hooks_of_the_module_run_once_per_pass": CallsForward,
    "a_comm_hook_sees_every_gradient_once": CallsTwice,
    "a_comm_hook_is_given_what_this_rank_computed": DividesBefore,
    "a_comm_hook_s_result_becomes_the_gradient": IgnoresTheResult,
    "a_comm_hook_s_future_may_be_late": TakesTheBuffer,
    "a_comm_hook_is_given_its_state": CopiesTheState,
    "torch_s_own_fp16_hook_works": DividesBefore,
    "the_built_in_comm_hook_averages": DividesBefore,
    "buckets_are_numbered_and_the_last_one_says_so": with_buckets(index=lambda bucket: 0),
    "buckets_name_their_parameters": with_buckets(
        gradients=lambda bucket: [gradient.flatten() for gradient in bucket.gradients()]
    ),
    "gradients_of_a_bucket_are_views_of_its_buffer": with_buckets(
        gradients=lambda bucket: [gradient.clone() for gradient in bucket.gradients()]
    ),
    "set_buffer_replaces_the_buffer": with_buckets(set_buffer=lambda bucket, buffer: None),
    "a_second_comm_hook_is_refused": LastHookCounts,
    "a_comm_hook_that_cannot_be_called_is_refused": LastHookCounts,
}
