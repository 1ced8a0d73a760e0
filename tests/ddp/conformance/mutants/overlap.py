"""Wrappers whose averages are right, or nearly, but which send too much, too late, or in another order."""

# ruff: noqa: RUF012
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ddp.conformance.mutant_bases import AtOnce, AverageEach, TorchDDP


class SendsTwice(TorchDDP):
    """Averages what is averaged."""

    def prepare(self) -> None:
        self.again = AverageEach(self.module)

    def after_forward(self, output: Any) -> Any:
        self.again._prepare_for_backward(output)
        return output


class OneByOne(AverageEach):
    """Has no buckets."""


class IgnoresTheCap(TorchDDP):
    """Ignores bucket_cap_mb."""

    def __init__(self, module: nn.Module, bucket_cap_mb: float | None = None, **options: Any) -> None:
        super().__init__(module, **options)


class CountsElements(TorchDDP):
    """Its cap counts elements, each of which has four bytes."""

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25, **options: Any) -> None:
        super().__init__(module, bucket_cap_mb=4 * bucket_cap_mb, **options)


class LargestOfTheList(TorchDDP):
    """Takes the largest of the caps for every bucket."""

    def __init__(self, module: nn.Module, bucket_cap_mb_list: Any = None, **options: Any) -> None:
        super().__init__(module, bucket_cap_mb=max(bucket_cap_mb_list), **options)


class AfterBackward(AverageEach):
    """Sends when backward is over, all gradients one after another, the last first."""

    def finish(self) -> None:
        for parameter in reversed(list(self.module.parameters())):
            if parameter.grad is not None:
                self.average(parameter.grad)


class FirstLayersFirst(AverageEach):
    """Sends in the order of registration."""


class NeverRebuilds(TorchDDP):
    """Keeps the buckets that it guessed at the start; torch does so with find_unused_parameters."""

    overrides = {"find_unused_parameters": True}


class SendsWeights(TorchDDP):
    """Sends rank 0's weights before each forward pass, to be safe."""

    def before_forward(self) -> None:
        for parameter in self.module.parameters():
            dist.broadcast(parameter.detach(), src=0)


class EvaluatesTogether(TorchDDP):
    """Waits for all ranks before each pass without gradients."""

    def before_forward(self) -> None:
        if not torch.is_grad_enabled():
            dist.all_reduce(torch.zeros(1))


class SendsFloat32(AverageEach):
    """Sends everything in float32."""

    def average(self, gradient: Tensor) -> None:
        flat = gradient.float()
        super().average(flat)
        gradient.copy_(flat)


class WaitsInTheNextForward(AverageEach):
    """Averages are waited for, and copied back, when the next forward pass begins."""

    pending: tuple[Any, ...] = ()

    def before_forward(self) -> None:
        for work, gradient, average in self.pending:
            work.wait()
            gradient.copy_(average)
        self.pending = ()

    def average(self, gradient: Tensor) -> None:
        average = gradient / dist.get_world_size()
        self.pending += ((dist.all_reduce(average, async_op=True), gradient, average),)


MUTANTS: dict[str, type[nn.Module]] = {
    "every_gradient_is_sent_once": SendsTwice,
    "small_gradients_travel_together": OneByOne,
    "a_small_bucket_cap_gives_every_gradient_its_own_message": IgnoresTheCap,
    "buckets_keep_to_their_cap": CountsElements,
    "a_list_gives_each_bucket_its_cap": LargestOfTheList,
    "sending_begins_while_backward_goes_on": AfterBackward,
    "the_last_layers_are_sent_first": FirstLayersFirst,
    "buckets_follow_the_order_in_which_gradients_come": NeverRebuilds,
    "ranks_may_compute_in_different_orders": AtOnce,
    "a_forward_pass_without_buffers_sends_nothing": SendsWeights,
    "ranks_may_evaluate_different_numbers_of_batches": EvaluatesTogether,
    "gradients_travel_in_their_own_dtype": SendsFloat32,
    "averages_are_there_when_backward_returns": WaitsInTheNextForward,
}
