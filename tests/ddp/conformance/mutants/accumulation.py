"""Wrappers whose no_sync does too little, or too much."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.ddp.conformance.mutant_bases import AverageEach, Together, TorchDDP


class SynchronizesAnyway(TorchDDP):
    """Has a no_sync that does nothing."""

    no_sync: Any = contextlib.nullcontext


class SendsAndForgets(TorchDDP):
    """Within no_sync, it sends as ever, and keeps the local gradients."""

    def before_forward(self) -> None:
        if not self.require_backward_grad_sync:
            for parameter in self.module.parameters():
                dist.all_reduce(torch.zeros_like(parameter))


class LastMicroStepOnly(AverageEach):
    """Averages the last micro-step's gradient, and adds it to the local sum."""

    def before_forward(self) -> None:
        self.before = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.trained]

    def finish(self) -> None:
        for parameter, before in zip(self.trained, self.before, strict=True):
            parameter.grad -= before
            self.average(parameter.grad)
            parameter.grad += before


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


class DecidesInBackward(AverageEach):
    """Whether backward stands within no_sync decides, and not where forward stood."""

    def after_forward(self, output: Any) -> Any:
        self.prepare_for_backward(output)
        return output

    def finish(self) -> None:
        if self.require_backward_grad_sync:
            super().finish()


MUTANTS = {
    "within_no_sync_gradients_stay_local": SynchronizesAnyway,
    "within_no_sync_nothing_is_sent": SendsAndForgets,
    "local_gradients_are_averaged_by_the_next_synchronized_pass": LastMicroStepOnly,
    "no_sync_ends_with_an_exception": NoFinally,
    "no_sync_within_no_sync_ends_with_the_outer_one": SetsTrue,
    "a_forward_pass_within_no_sync_is_local_wherever_its_backward_is": DecidesInBackward,
    "a_forward_pass_outside_no_sync_is_synchronized_wherever_its_backward_is": DecidesInBackward,
    "the_flag_of_no_sync_counts_when_forward_runs": DecidesInBackward,
    "ranks_may_take_different_numbers_of_local_steps": Together,
    # of other topics
    "a_static_graph_accumulates_after_its_first_step": SynchronizesAnyway,
    "a_parameter_that_was_used_only_under_no_sync_is_averaged_too": LastMicroStepOnly,
}
