"""Wrappers whose averages are wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ddp.conformance.mutant_bases import AverageEach, TorchDDP


class Sums(TorchDDP):
    """Adds the gradients and forgets to divide."""

    def prepare(self) -> None:
        for parameter in self.module.parameters():
            parameter.register_hook(lambda gradient: gradient * dist.get_world_size())


class FirstStepsOnly(AverageEach):
    """Its hooks are gone after two steps."""

    steps = 0

    def finish(self) -> None:
        self.steps += 1
        if self.steps <= 2:
            super().finish()


class EverySecondStep(AverageEach):
    """Averages every second step: what it takes for its buckets' turn."""

    steps = 0

    def finish(self) -> None:
        self.steps += 1
        if self.steps % 2:
            super().finish()


class WeightsBySamples(AverageEach):
    """A rank with more samples has more weight."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.samples = torch.tensor(float(len(inputs[0])))
        return super().forward(*inputs, **kwargs)

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
    """Averages all gradients in one float32 tensor."""

    def average(self, gradient: Tensor) -> None:
        flat = gradient.float()
        super().average(flat)
        gradient.copy_(flat)


class OneDtype(AverageEach):
    """Has one bucket, of the first parameter's dtype."""

    def average(self, gradient: Tensor) -> None:
        if gradient.dtype == next(self.module.parameters()).dtype:
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


class SendsACopy(AverageEach):
    """Sends contiguous copies of parameters with gaps in memory, so that the parameters keep the rank's own values."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        own = [parameter.detach().clone() for parameter in module.parameters()]
        super().__init__(module)
        for parameter, before in zip(module.parameters(), own, strict=True):
            if not parameter.is_contiguous():
                parameter.data.copy_(before)


class InRows(AverageEach):
    """Its gradients lie in rows, whatever the parameter's strides."""

    def finish(self) -> None:
        super().finish()
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.contiguous()


class OncePerTensor(AverageEach):
    """Takes a .grad that it has seen for one that is averaged."""

    def prepare(self) -> None:
        self.seen: list[Tensor] = []

    def average(self, gradient: Tensor) -> None:
        if not any(gradient is one for one in self.seen):
            self.seen.append(gradient)
            super().average(gradient)


class ForgetsThePast(AverageEach):
    """Its average takes the place of what was in .grad."""

    def before_forward(self) -> None:
        self.module.zero_grad()


class OwnSum(AverageEach):
    """Remembers the averages by itself, and writes its sum over .grad."""

    def prepare(self) -> None:
        self.sums = {p: torch.zeros_like(p) for p in self.module.parameters()}
        self.left = {p: torch.zeros_like(p) for p in self.module.parameters()}  # what was in .grad at the end of a step

    def before_forward(self) -> None:
        for parameter, total in self.sums.items():
            if parameter.grad is None or not parameter.grad.any():
                total.zero_()
            self.left[parameter] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()

    def finish(self) -> None:
        super().finish()
        for parameter, total in self.sums.items():
            if parameter.grad is not None:
                total += parameter.grad - self.left[parameter]
                parameter.grad.copy_(total)


class KeepsItsViews(AverageEach):
    """Puts the tensors of the first step back before each forward pass, whatever stands in .grad."""

    def prepare(self) -> None:
        self.views: dict[nn.Parameter, Tensor | None] = {}

    def before_forward(self) -> None:
        for parameter, view in self.views.items():
            parameter.grad = view

    def finish(self) -> None:
        super().finish()
        self.views = {parameter: parameter.grad for parameter in self.module.parameters()}


class NoViews(TorchDDP):
    """Ignores gradient_as_bucket_view."""

    def __init__(self, module: nn.Module, gradient_as_bucket_view: bool = False, **options: Any) -> None:
        super().__init__(module, **options)


class OwnOrder(AverageEach):
    """Every rank adds in an order of its own, beginning with itself."""

    def average(self, gradient: Tensor) -> None:
        everyone = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, gradient.contiguous())
        mine = dist.get_rank()
        ordered = torch.stack(everyone[mine:] + everyone[:mine]) * (1 + 1e-7 * mine)
        gradient.copy_(ordered.sum(0) / dist.get_world_size())


MUTANTS: dict[str, type[nn.Module]] = {
    "gradients_are_the_average_of_the_ranks": Sums,
    "every_step_averages": FirstStepsOnly,
    "training_equals_one_process_with_the_whole_batch": EverySecondStep,
    "every_rank_counts_the_same_whatever_its_batch_size": WeightsBySamples,
    "a_nan_on_one_rank_reaches_all": LeavesOutNaN,
    "large_fp16_gradients_do_not_overflow": AddsFirst,
    "double_precision_is_kept": InFloat32,
    "parameters_of_several_dtypes_are_all_averaged": OneDtype,
    "scalar_and_empty_parameters_are_averaged_too": NoScalars,
    "channels_last_weights_are_averaged": RowsIntoStrides,
    "parameters_with_gaps_in_memory_are_averaged": SendsACopy,
    "gradients_have_the_strides_of_their_parameters": InRows,
    "gradients_zeroed_in_place_are_averaged_afresh": OncePerTensor,
    "gradients_add_up_over_synchronized_steps": ForgetsThePast,
    "gradients_may_be_changed_in_place_between_steps": OwnSum,
    "gradients_may_be_replaced_between_steps": KeepsItsViews,
    "gradients_may_be_views_of_the_buckets": NoViews,
    "averages_are_the_same_bits_on_every_rank": OwnOrder,
}
