"""Mutants for the checks of the parameters that a pass uses."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.nn.parallel.distributed import _find_tensors

from ddp.conformance.steps import of_all_ranks
from tests.ddp.conformance.mutant_bases import AtOnce, AverageEach, TorchDDP


class _LeavesSomeWithout(AverageEach):
    """Some parameters have no gradient in the end."""

    def finish(self) -> None:
        used = [parameter.grad is not None for parameter in self.trained]
        super().finish()
        for parameter, receives in zip(self.trained, self.receivers(used), strict=True):
            if not receives:
                parameter.grad = None

    def receivers(self, used: list[bool]) -> list[Any]:
        """For each parameter something that is false if it is to have no gradient.

        :param used: whether this rank uses it
        """
        raise NotImplementedError


def users(used: list[bool]) -> list[int]:
    """How many ranks use each parameter."""
    return [sum(flags) for flags in zip(*of_all_ranks(used), strict=True)]


class DividesByTheUsers(_LeavesSomeWithout):
    """An average is that of the ranks that use the parameter."""

    def receivers(self, used: list[bool]) -> list[Any]:
        numbers = users(used)
        for parameter, number in zip(self.trained, numbers, strict=True):
            parameter.grad *= dist.get_world_size() / max(number, 1)
        return numbers


class FollowsRankZero(_LeavesSomeWithout):
    """Takes what rank 0 uses for what all use."""

    def receivers(self, used: list[bool]) -> list[Any]:
        return list(of_all_ranks(used)[0])


class RemembersTheFirstStep(_LeavesSomeWithout):
    """Takes what the first step used for what all steps use."""

    first: list[int] | None = None

    def receivers(self, used: list[bool]) -> list[Any]:
        self.first = self.first or users(used)
        return self.first


class GivesToUsersOnly(_LeavesSomeWithout):
    """A rank that does not use a parameter gets no average."""

    def receivers(self, used: list[bool]) -> list[Any]:
        return used


class WaitsForEveryOutput(TorchDDP):
    """Takes all parameters that the outputs depend on for used, whatever the loss uses."""

    def _post_forward(self, output: Any) -> Any:
        self.reducer.prepare_for_backward(list(_find_tensors(output)))
        return output


class MixesUpGradients(AverageEach):
    """Buckets that are built again give two layers each other's gradients."""

    def finish(self) -> None:
        super().finish()
        first, _, second, *_ = self.trained
        first.grad, second.grad = second.grad, first.grad


class SendsAtTheFirstUse(AtOnce):
    """Takes the gradient that comes first in a step for the whole."""

    def before_forward(self) -> None:
        self.done: set[Any] = set()

    def ready(self, parameter: Any) -> None:
        if parameter not in self.done:
            self.done.add(parameter)
            super().ready(parameter)


MUTANTS = {
    "a_parameter_that_one_rank_leaves_out_counts_as_zeros_there": DividesByTheUsers,
    "a_parameter_that_no_rank_uses_stays_without_gradient": AverageEach,
    "each_rank_may_use_other_parameters": FollowsRankZero,
    "the_used_parameters_may_change_from_step_to_step": RemembersTheFirstStep,
    "an_output_may_be_left_out_of_the_loss": WaitsForEveryOutput,
    "unused_parameters_that_are_the_same_everywhere_need_not_be_sent": AverageEach,
    "a_static_graph_trains_as_a_dynamic_one": MixesUpGradients,
    "a_static_graph_may_have_unused_parameters": AverageEach,
    "ranks_may_have_different_static_graphs": GivesToUsersOnly,
    "a_layer_of_two_checkpoints_is_averaged_with_both_uses": SendsAtTheFirstUse,
}
