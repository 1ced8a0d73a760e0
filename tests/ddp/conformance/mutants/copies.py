"""Mutants for the checks of copies."""

# mypy: disable-error-code="no-untyped-call, no-any-return"
# ruff: noqa: RUF012
from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tests.ddp.conformance.mutant_bases import AverageEach, TorchDDP


class SharesItsParameters(TorchDDP):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)(self.module)


class TakesTheHooksAlong(TorchDDP):
    """The copy gets the hooks; the original has none left."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = type(self)(copy.deepcopy(self.module, memo))
        self._remove_autograd_hooks()
        return copied


class LosesItsHooks(TorchDDP):
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._remove_autograd_hooks()


class AsksTheOthersToEvaluate(TorchDDP):
    def before_forward(self) -> None:
        dist.barrier()


class CallsItsModuleModel(AverageEach):
    """Not derived from torch's, with another name in its state_dict."""

    def prepare(self) -> None:
        self.model = self._modules.pop("module")

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__("model" if name == "module" else name)


class GivesCopiesToOptimizers(TorchDDP):
    """Master weights, which are not those that the module names."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter([nn.Parameter(parameter.detach().clone()) for parameter in self.module.parameters()])


class HoldsItself(TorchDDP):
    def prepare(self) -> None:
        for parameter in self.module.parameters():
            parameter.register_post_accumulate_grad_hook(self._seen)

    def _seen(self, _: Tensor) -> None:
        """Counts gradients, or writes a log."""


def _average(parameter: Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad.div_(dist.get_world_size()))


class LeavesItsHooks(nn.Module):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(_average)

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


def _sum(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with types
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


class SharesGradientsWithBuckets(TorchDDP):
    """Two wrappers cannot both have the gradients in their buckets."""

    overrides = {"gradient_as_bucket_view": True}


MUTANTS: dict[str, Any] = {
    "a_deep_copy_trains_on": SharesItsParameters,
    "the_original_trains_on_after_a_deep_copy": TakesTheHooksAlong,
    "a_wrapper_can_be_pickled": LosesItsHooks,
    "a_moving_average_of_the_wrapper_needs_no_other_rank": AsksTheOthersToEvaluate,
    "distributed_checkpoints_have_the_modules_own_names": CallsItsModuleModel,
    "optimizer_checkpoints_have_the_modules_own_names": GivesCopiesToOptimizers,
    "a_dropped_wrapper_is_freed": HoldsItself,
    "a_dropped_wrapper_averages_no_more": LeavesItsHooks,
    "a_wrapper_may_stand_in_another": SharesGradientsWithBuckets,
}
