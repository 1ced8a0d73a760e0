"""Wrappers whose averages are right, or nearly, but which send too much, too late, or in another order."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.ddp.conformance.mutant_bases import AtOnce, AverageEach, Together, TorchDDP, torch_with, torch_without


class SendsTwice(AverageEach):
    """Averages what is averaged."""

    def average(self, gradient: Tensor) -> None:
        super().average(gradient)
        super().average(gradient)


class SendsWeights(TorchDDP):
    """Sends rank 0's weights before each forward pass, to be safe."""

    def before_forward(self) -> None:
        for parameter in self.module.parameters():
            dist.broadcast(parameter.detach(), src=0)


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


MUTANTS = {
    "every_gradient_is_sent_once": SendsTwice,
    "small_gradients_travel_together": AverageEach,
    "a_small_bucket_cap_gives_every_gradient_its_own_message": torch_without("bucket_cap_mb"),
    "buckets_keep_to_their_cap": torch_without("bucket_cap_mb"),
    "a_list_gives_each_bucket_its_cap": torch_without("bucket_cap_mb_list"),
    "sending_begins_while_backward_goes_on": AverageEach,
    "the_last_layers_are_sent_first": AverageEach,
    # With this option, torch keeps the buckets that it guessed at the start.
    "buckets_follow_the_order_in_which_gradients_come": torch_with(find_unused_parameters=True),
    "ranks_may_compute_in_different_orders": AtOnce,
    "a_forward_pass_without_buffers_sends_nothing": SendsWeights,
    "ranks_may_evaluate_different_numbers_of_batches": Together,
    "averages_are_there_when_backward_returns": WaitsInTheNextForward,
}
