"""Wrappers that accept what they cannot do, hide errors, or never recover from one."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.ddp.conformance.mutant_bases import AverageEach, TorchDDP, torch_with


class HidesErrors(TorchDDP):
    """Turns each error into its own, which says no more than that something is wrong."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        try:
            super().__init__(module, **options)
        except RuntimeError:
            raise ValueError("something is wrong") from None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs)
        except Exception:
            raise ValueError("something is wrong") from None


class WrapsLater(nn.Module):
    """Wraps in the first forward pass, and accepts anything before."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module, self.options = module, options

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.wrapped = TorchDDP(self.module, **self.options)
        return self.wrapped(*inputs, **kwargs)


class StaysInForward(AverageEach):
    """Takes the pass after one that failed in forward for a part of that one, which is local."""

    inside = False

    def before_forward(self) -> None:
        self.nested, self.inside = self.inside, True

    def after_forward(self, output: Any) -> Any:
        self.inside = False
        return output

    def finish(self) -> None:
        if not self.nested:
            super().finish()


MUTANTS = {
    "an_unused_parameter_is_an_error": torch_with(find_unused_parameters=True),
    "the_error_of_an_unused_parameter_names_it": HidesErrors,
    "a_module_with_nothing_to_train_is_refused": WrapsLater,
    "device_ids_for_a_module_on_the_cpu_are_refused": WrapsLater,
    "lazy_parameters_are_refused": WrapsLater,
    "parameters_on_two_kinds_of_device_are_refused": WrapsLater,
    "a_module_s_error_comes_out_as_it_is": HidesErrors,
    "training_goes_on_after_an_error_in_forward": StaysInForward,
    "options_that_do_not_exist_are_refused": WrapsLater,
    "a_group_and_a_mesh_together_are_refused": WrapsLater,
    # of other topics
    "the_error_of_differing_modules_names_the_rank": HidesErrors,
}
