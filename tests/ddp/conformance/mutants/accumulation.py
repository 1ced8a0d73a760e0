"""Wrappers whose no_sync does too little, or too much."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ddp.conformance.mutant_bases import AverageEach, TorchDDP


class SynchronizesAnyway(TorchDDP):
    """Has a no_sync that does nothing."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


class SendsAndForgets(TorchDDP):
    """Within no_sync, it sends as ever, and puts the local gradients back."""

    def before_forward(self) -> None:
        if not self.require_backward_grad_sync:
            for parameter in self.module.parameters():
                dist.all_reduce(torch.zeros_like(parameter))


class _SeesNewGradients(AverageEach):
    """Knows what was in .grad before this step, in which :meth:`finish` finds ``before[parameter]``."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.before: dict[nn.Parameter, Tensor] = {}
        self.as_views = bool(options.get("gradient_as_bucket_view"))

    def before_forward(self) -> None:
        for p in self.module.parameters():
            self.before[p] = torch.zeros_like(p) if p.grad is None else p.grad.clone()


class LastMicroStepOnly(_SeesNewGradients):
    """Averages the last micro-step's gradient, and adds it to the local sum."""

    def finish(self) -> None:
        for parameter, before in self.before.items():
            if parameter.grad is not None:
                parameter.grad -= before
                self.average(parameter.grad)
                parameter.grad += before


class DividesTheNew(_SeesNewGradients):
    """With views, only what is new is divided: the local sum in the bucket is taken for divided already."""

    def finish(self) -> None:
        if not self.as_views:
            super().finish()
            return
        for parameter, before in self.before.items():
            if parameter.grad is not None:
                parameter.grad.copy_(before + (parameter.grad - before) / dist.get_world_size())
                dist.all_reduce(parameter.grad)


class FirstAccumulationOnly(AverageEach):
    """Averages the first synchronized pass after no_sync, and not the next ones."""

    accumulated = False

    def before_forward(self) -> None:
        self.local = (self.accumulated and not self.require_backward_grad_sync) or getattr(self, "local", False)
        self.accumulated = self.accumulated or not self.require_backward_grad_sync

    def finish(self) -> None:
        if not self.local:
            super().finish()


class NoFinally(TorchDDP):
    """Its no_sync has no ``finally``."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.require_backward_grad_sync = False
        yield
        self.require_backward_grad_sync = True


class SetsTrue(TorchDDP):
    """Its no_sync ends with True, not with what was before."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = True


class ForGood(TorchDDP):
    """Once local, always local."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.require_backward_grad_sync = False
        yield


class DecidesInBackward(AverageEach):
    """What counts is whether backward stands within no_sync."""

    def _prepare_for_backward(self, output: Any) -> None:
        if torch.is_grad_enabled():
            super()._prepare_for_backward(output)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        output = self.module(*inputs, **kwargs)
        self._prepare_for_backward(output)
        return output

    def finish(self) -> None:
        if self.require_backward_grad_sync:
            super().finish()


class BothMustBeOutside(AverageEach):
    """A backward within no_sync is local, too."""

    def finish(self) -> None:
        if self.require_backward_grad_sync:
            super().finish()


class TogetherWithinNoSync(TorchDDP):
    """Lets the ranks wait for each other at each micro-step."""

    def before_forward(self) -> None:
        if not self.require_backward_grad_sync:
            dist.barrier()


MUTANTS: dict[str, type[nn.Module]] = {
    "within_no_sync_gradients_stay_local": SynchronizesAnyway,
    "within_no_sync_nothing_is_sent": SendsAndForgets,
    "local_gradients_are_averaged_by_the_next_synchronized_pass": LastMicroStepOnly,
    "accumulation_works_step_after_step": FirstAccumulationOnly,
    "accumulation_works_with_gradients_as_views": DividesTheNew,
    "no_sync_ends_with_an_exception": NoFinally,
    "no_sync_within_no_sync_ends_with_the_outer_one": SetsTrue,
    "after_no_sync_passes_synchronize_again": ForGood,
    "a_forward_pass_within_no_sync_is_local_wherever_its_backward_is": DecidesInBackward,
    "a_forward_pass_outside_no_sync_is_synchronized_wherever_its_backward_is": BothMustBeOutside,
    "the_flag_of_no_sync_counts_when_forward_runs": BothMustBeOutside,
    "ranks_may_take_different_numbers_of_local_steps": TogetherWithinNoSync,
}
