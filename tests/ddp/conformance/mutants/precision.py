"""Mutants for the checks of precision."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.ddp.conformance.mutants.bases import AverageEach


class SumsInBfloat16(AverageEach):
    def _average_gradients(self) -> None:
        for parameter in self.module.parameters():
            assert parameter.grad is not None
            sent = parameter.grad.bfloat16() / dist.get_world_size()
            dist.all_reduce(sent)
            parameter.grad.copy_(sent)


class RepairsGradients(AverageEach):
    def _average_gradients(self) -> None:
        for parameter in self.module.parameters():
            assert parameter.grad is not None
            torch.nan_to_num_(parameter.grad, posinf=0.0, neginf=0.0)
        super()._average_gradients()


class Sums(AverageEach):
    def _average_gradients(self) -> None:
        super()._average_gradients()
        for parameter in self.module.parameters():
            assert parameter.grad is not None
            parameter.grad *= dist.get_world_size()


class GivesRankZeroTheAverages(AverageEach):
    def _average_gradients(self) -> None:
        own = [parameter.grad.clone() for parameter in self.module.parameters() if parameter.grad is not None]
        super()._average_gradients()
        if dist.get_rank() != 0:
            for parameter, gradient in zip(self.module.parameters(), own, strict=True):
                parameter.grad = gradient


MUTANTS: dict[str, Any] = {
    "autocast_leaves_the_averages_in_float32": SumsInBfloat16,
    "an_overflow_on_one_rank_skips_the_step_on_all": RepairsGradients,
    "clipping_after_unscaling_is_that_of_one_process": Sums,
    "clipping_gives_all_ranks_the_same": GivesRankZeroTheAverages,
}
