"""Wrappers whose averages are wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ddp.conformance.mutant_bases import AverageEach, TorchDDP, torch_without


class Sums(TorchDDP):
    """Adds the gradients and forgets to divide."""

    def prepare(self) -> None:
        for parameter in self.module.parameters():
            parameter.register_hook(lambda gradient: gradient * dist.get_world_size())


class EverySecondStep(AverageEach):
    """Averages every second step: what it takes for its buckets' turn."""

    steps = 0

    def finish(self) -> None:
        self.steps += 1
        if self.steps % 2:
            super().finish()


class WeightsBySamples(AverageEach):
    """A rank with more samples has more weight."""

    def after_forward(self, output: Any) -> Any:
        self.samples = torch.tensor(float(len(output)))
        return output

    def average(self, gradient: Tensor) -> None:
        total = self.samples.clone()
        dist.all_reduce(total)
        gradient *= self.samples / total
        dist.all_reduce(gradient)


class LeavesOutNaN(AverageEach):
    """Treats what is not finite as zero."""

    def average(self, gradient: Tensor) -> None:
        gradient.nan_to_num_(0.0)
        super().average(gradient)


class AddsFirst(AverageEach):
    """Adds, then divides."""

    def average(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


class InFloat32(AverageEach):
    """Averages all gradients in float32."""

    def average(self, gradient: Tensor) -> None:
        flat = gradient.float()
        super().average(flat)
        gradient.copy_(flat)


class OneDtype(AverageEach):
    """Has one bucket, of the first parameter's dtype."""

    def average(self, gradient: Tensor) -> None:
        if gradient.dtype == self.trained[0].dtype:
            super().average(gradient)


class NoScalars(AverageEach):
    """Takes parameters without dimensions for buffers."""

    def average(self, gradient: Tensor) -> None:
        if gradient.dim():
            super().average(gradient)


class RowsIntoStrides(AverageEach):
    """Flattens by rows, and writes back by memory."""

    def average(self, gradient: Tensor) -> None:
        flat = gradient.reshape(-1).clone()
        super().average(flat)
        gradient.copy_(flat.as_strided(gradient.shape, gradient.stride()))


class InRows(AverageEach):
    """Its gradients lie in rows, whatever the parameter's strides."""

    def finish(self) -> None:
        super().finish()
        for parameter in self.trained:
            parameter.grad.data = parameter.grad.contiguous()


class OncePerTensor(AverageEach):
    """Takes a .grad that it has seen for one that is averaged."""

    def prepare(self) -> None:
        self.seen: set[Tensor] = set()

    def average(self, gradient: Tensor) -> None:
        if gradient not in self.seen:
            self.seen.add(gradient)
            super().average(gradient)


class ForgetsThePast(AverageEach):
    """Its average takes the place of what was in .grad."""

    def before_forward(self) -> None:
        self.module.zero_grad()


class KeepsItsViews(AverageEach):
    """Puts the tensors of the first step back before each forward pass, whatever stands in .grad."""

    views: Any = ()

    def before_forward(self) -> None:
        for parameter, view in zip(self.trained, self.views, strict=False):
            parameter.grad = view

    def finish(self) -> None:
        super().finish()
        self.views = [parameter.grad for parameter in self.trained]


class RoundsInItsOwnWay(AverageEach):
    """Every rank has other last bits, as if it added in an order of its own."""

    def average(self, gradient: Tensor) -> None:
        super().average(gradient)
        gradient *= 1 + 2e-7 * dist.get_rank()


MUTANTS = {
    "gradients_are_the_average_of_the_ranks": Sums,
    "every_step_averages": EverySecondStep,
    "training_equals_one_process_with_the_whole_batch": EverySecondStep,
    "every_rank_counts_the_same_whatever_its_batch_size": WeightsBySamples,
    "a_nan_on_one_rank_reaches_all": LeavesOutNaN,
    "large_fp16_gradients_do_not_overflow": AddsFirst,
    "double_precision_is_kept": InFloat32,
    "parameters_of_several_dtypes_are_all_averaged": OneDtype,
    "scalar_and_empty_parameters_are_averaged_too": NoScalars,
    "channels_last_weights_are_averaged": RowsIntoStrides,
    "gradients_have_the_strides_of_their_parameters": InRows,
    "gradients_zeroed_in_place_are_averaged_afresh": OncePerTensor,
    "gradients_add_up_over_synchronized_steps": ForgetsThePast,
    "gradients_may_be_replaced_between_steps": KeepsItsViews,
    "gradients_may_be_views_of_the_buckets": torch_without("gradient_as_bucket_view"),
    "averages_are_the_same_bits_on_every_rank": RoundsInItsOwnWay,
    # of other topics
    "accumulation_works_step_after_step": EverySecondStep,
    "accumulation_works_with_gradients_as_views": OncePerTensor,
    "clipping_after_unscaling_is_that_of_one_process": Sums,
    "gradients_travel_in_their_own_dtype": InFloat32,
    "an_old_gradient_stays_as_it_is_where_no_rank_uses_the_parameter": ForgetsThePast,
}
