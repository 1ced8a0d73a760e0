"""Wrappers that call hooks too early, too late, or with something else."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tests.ddp.conformance.mutant_bases import AtOnce, AverageEach, TorchDDP


class BeforeTensorHooks(AverageEach):
    """Sends what comes to its own tensor hook, which is the first."""

    def prepare(self) -> None:
        self.arrived: dict[int, Tensor] = {}
        for index, parameter in enumerate(self.module.parameters()):
            parameter.register_hook(lambda gradient, index=index: self.arrived.update({index: gradient.clone()}))

    def finish(self) -> None:
        for index, parameter in enumerate(self.module.parameters()):
            parameter.grad = self.arrived[index]
        super().finish()


class AveragesOutputs(TorchDDP):
    """Averages the loss's gradient, too, for good measure."""

    def after_forward(self, output: Any) -> Any:
        output.register_hook(self.averaged)
        return output

    def averaged(self, gradient: Tensor) -> Tensor:
        gradient = gradient / dist.get_world_size()
        dist.all_reduce(gradient)
        return gradient


class CallsForward(AverageEach):
    """Calls module.forward, as if that were the same."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        output = self.module.forward(*inputs, **kwargs)
        self._prepare_for_backward(output)
        return output


class _Changes(TorchDDP):
    """Calls the hook through :meth:`call`, in which something is changed."""

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        super().register_comm_hook(state, lambda state, bucket: self.call(hook, state, bucket))

    def call(self, hook: Any, state: Any, bucket: Any) -> Any:
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
    """Sends the bucket, whatever the hook returns."""

    def call(self, hook: Any, state: Any, bucket: Any) -> Any:
        mine = bucket.buffer().clone()
        hook(state, bucket).wait()
        return dist.all_reduce(mine / dist.get_world_size(), async_op=True).get_future().then(lambda f: f.value()[0])


class DividesAfter(_Changes):
    """Takes the hook's result for a sum."""

    def call(self, hook: Any, state: Any, bucket: Any) -> Any:
        return hook(state, bucket).then(lambda future: _tensor(future.value()) / dist.get_world_size())


class TakesTheBuffer(_Changes):
    """Waits for the hook, and takes what is in the buffer."""

    def call(self, hook: Any, state: Any, bucket: Any) -> Any:
        return hook(state, bucket).then(lambda _: bucket.buffer())


class CopiesTheState(_Changes):
    """Gives each call a copy of the state."""

    def call(self, hook: Any, state: Any, bucket: Any) -> Any:
        return hook(dict(state), bucket)


class MultipliesAfter(_Changes):
    """Takes the hook's result for an average of what was divided before."""

    def call(self, hook: Any, state: Any, bucket: Any) -> Any:
        return hook(state, bucket).then(lambda future: _tensor(future.value()) * dist.get_world_size())


def _tensor(result: Any) -> Any:
    return result[0] if isinstance(result, list) else result


class _Bucket:
    """A bucket as a hook sees it, to change one of its methods."""

    def __init__(self, bucket: Any) -> None:
        self._bucket = bucket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)


class _ChangesBuckets(_Changes):
    bucket: type[_Bucket]

    def call(self, hook: Any, state: Any, bucket: Any) -> Any:
        return hook(state, self.bucket(bucket))


class AlwaysFirst(_ChangesBuckets):
    """Each of its buckets says that it is the first."""

    class bucket(_Bucket):
        def index(self) -> int:
            return 0


class FlatGradients(_ChangesBuckets):
    """gradients() are flat."""

    class bucket(_Bucket):
        def gradients(self) -> list[Tensor]:
            return [gradient.flatten() for gradient in self._bucket.gradients()]


class CopiedGradients(_ChangesBuckets):
    """gradients() are copies."""

    class bucket(_Bucket):
        def gradients(self) -> list[Tensor]:
            return [gradient.clone() for gradient in self._bucket.gradients()]


class KeepsItsBuffer(_ChangesBuckets):
    """set_buffer does nothing."""

    class bucket(_Bucket):
        def set_buffer(self, buffer: Tensor) -> None:
            """Not now."""


class LastHookCounts(TorchDDP):
    """A second hook takes the place of the first, and what is no function that of none."""

    hook: Any = None

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        if self.hook is None:
            super().register_comm_hook(state, lambda state, bucket: self.hook(state, bucket))
        self.hook = hook


MUTANTS: dict[str, type[nn.Module]] = {
    "hooks_of_parameters_run_before_the_average": BeforeTensorHooks,
    "accumulation_hooks_from_before_wrapping_run_before_the_average": BeforeTensorHooks,
    "accumulation_hooks_from_after_wrapping_run_before_the_average": AtOnce,
    "backward_hooks_of_modules_see_local_gradients": AveragesOutputs,
    "forward_hooks_of_the_module_run_once_per_pass": CallsForward,
    "a_comm_hook_sees_every_gradient_once": CallsTwice,
    "a_comm_hook_is_given_what_this_rank_computed": DividesBefore,
    "a_comm_hook_s_result_becomes_the_gradient": IgnoresTheResult,
    "a_comm_hook_s_future_may_be_late": TakesTheBuffer,
    "a_comm_hook_is_given_its_state": CopiesTheState,
    "torch_s_own_fp16_hook_works": DividesAfter,
    "the_built_in_comm_hook_averages": MultipliesAfter,
    "buckets_are_numbered_and_the_last_one_says_so": AlwaysFirst,
    "buckets_name_their_parameters": FlatGradients,
    "gradients_of_a_bucket_are_views_of_its_buffer": CopiedGradients,
    "set_buffer_replaces_the_buffer": KeepsItsBuffer,
    "a_second_comm_hook_is_refused": LastHookCounts,
    "a_comm_hook_that_cannot_be_called_is_refused": LastHookCounts,
}
