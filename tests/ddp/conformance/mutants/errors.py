"""Wrappers that accept what they cannot do, or never recover from an error."""

# ruff: noqa: RUF012
from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.ddp.conformance.mutant_bases import AverageEach, TorchDDP


class FindsUnusedAlways(TorchDDP):
    """Treats unused parameters as zeros, asked or not."""

    overrides = {"find_unused_parameters": True}


class SaysOnlyThat(TorchDDP):
    """Says that something has no gradient."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError:
            raise RuntimeError("some parameters have received no gradient") from None


class AcceptsAnything(AverageEach):
    """Does not ask whether there is something to average, nor where it is."""


class TakesItsTime(nn.Module):
    """Wraps in the first forward pass."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module, self.options = module, options

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.wrapped = AverageEach(self.module, **self.options)
        return self.wrapped(*inputs, **kwargs)


class Materializes(TorchDDP):
    """Gives parameters on the meta device some values, each rank its own."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        for name, child in list(module.named_modules()):
            if name and any(p.is_meta for p in child.parameters(recurse=False)):
                child.to_empty(device="cpu")
        super().__init__(module, **options)


class OwnError(TorchDDP):
    """Turns each error of the module into its own."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs)
        except Exception as error:
            raise RuntimeError(f"forward failed: {error}") from error


class StaysInForward(AverageEach):
    """Takes the pass after one that failed in forward for a part of that one, which is local."""

    inside = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.nested, self.inside = self.inside, True
        output = super().forward(*inputs, **kwargs)
        self.inside = False
        return output

    def finish(self) -> None:
        if not self.nested:
            super().finish()


class StaysInBackward(AverageEach):
    """Takes the pass after one that failed in backward for a part of that one."""

    def _schedule(self, *gradients: Any) -> None:
        super()._schedule(*gradients)

    def _prepare_for_backward(self, output: Any) -> None:
        scheduled = self._scheduled
        super()._prepare_for_backward(output)
        self._scheduled = scheduled


class CountsForwards(AverageEach):
    """Averages when as many backward passes are over as forward passes."""

    missing = 0

    def before_forward(self) -> None:
        self.missing += torch.is_grad_enabled()

    def finish(self) -> None:
        self.missing -= 1
        if not self.missing:
            super().finish()


class FirstOfTwo(TorchDDP):
    """Of a mesh and a group, it takes the group."""

    def __init__(self, module: nn.Module, process_group: Any = None, device_mesh: Any = None, **options: Any) -> None:
        super().__init__(module, process_group=process_group, **options)


class IgnoresDevices(TorchDDP):
    """Ignores device_ids."""

    def __init__(self, module: nn.Module, device_ids: Any = None, **options: Any) -> None:
        super().__init__(module, **options)


MUTANTS: dict[str, type[nn.Module]] = {
    "an_unused_parameter_is_an_error": FindsUnusedAlways,
    "the_error_of_an_unused_parameter_names_it": SaysOnlyThat,
    "a_module_with_nothing_to_train_is_refused": AcceptsAnything,
    "device_ids_for_a_module_on_the_cpu_are_refused": IgnoresDevices,
    "lazy_parameters_are_refused": TakesItsTime,
    "parameters_on_two_kinds_of_device_are_refused": Materializes,
    "a_module_s_error_comes_out_as_it_is": OwnError,
    "training_goes_on_after_an_error_in_forward": StaysInForward,
    "training_goes_on_after_an_error_in_the_middle_of_backward": StaysInBackward,
    "a_forward_pass_that_is_never_followed_by_backward_does_no_harm": CountsForwards,
    "options_that_do_not_exist_are_refused": AcceptsAnything,
    "a_group_and_a_mesh_together_are_refused": FirstOfTwo,
}
