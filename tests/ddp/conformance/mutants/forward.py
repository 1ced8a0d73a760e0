"""Wrappers that are wrong about what forward takes, returns, or runs in."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tests.ddp.conformance.mutant_bases import AverageEach, TorchDDP


class NoDicts(AverageEach):
    """Looks for its outputs in dataclasses, lists and tuples."""

    def outputs(self, output: Any) -> list[Tensor]:
        return [] if isinstance(output, dict) else super().outputs(output)


class NoDataclasses(AverageEach):
    """Looks for its outputs in dicts, lists and tuples."""

    def outputs(self, output: Any) -> list[Tensor]:
        return [] if dataclasses.is_dataclass(output) else super().outputs(output)


class LastOutputOnly(AverageEach):
    """Backward begins at the last output."""

    def outputs(self, output: Any) -> list[Tensor]:
        return super().outputs(output)[-1:]


class PositionsOnly(TorchDDP):
    """Passes on what has no name."""

    def forward(self, *inputs: Any, **_: Any) -> Any:
        return super().forward(*inputs)


class LastForwardDecides(AverageEach):
    """Whether it synchronizes is decided by the last forward pass, be it an evaluation."""

    def before_forward(self) -> None:
        self.training_pass = torch.is_grad_enabled()

    def finish(self) -> None:
        if self.training_pass:
            super().finish()


class InTrainingMode(AverageEach):
    """Averages in training mode."""

    def finish(self) -> None:
        if self.training:
            super().finish()


class HalfPrecisionInference(TorchDDP):
    """A pass without gradients computes in half the precision."""

    def after_forward(self, output: Any) -> Any:
        return output.bfloat16().float() if torch.is_inference_mode_enabled() else output


MUTANTS = {
    "outputs_may_be_nested_dicts_and_lists": NoDicts,
    "outputs_may_be_dataclasses": NoDataclasses,
    "a_loss_may_use_one_output_of_several": LastOutputOnly,
    "inputs_may_be_given_by_name": PositionsOnly,
    "an_evaluation_may_stand_between_forward_and_backward": LastForwardDecides,
    "a_module_in_evaluation_mode_is_averaged_too": InTrainingMode,
    "inference_mode_gives_the_module_s_own_output": HalfPrecisionInference,
}
