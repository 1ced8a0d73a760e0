"""Mutants for the checks of join."""

# mypy: disable-error-code="no-untyped-call, no-any-return, override"
from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from tests.ddp.conformance.mutant_bases import TorchDDP


def joins_with(**fixed: Any) -> Any:
    """A wrapper whose join always has these options."""

    class Joins(TorchDDP):
        def join(self, **options: Any) -> Join:
            return super().join(**options | fixed)

    return Joins


class _Hook(JoinHook):
    """Lets the model decide what a rank that has finished does."""

    def __init__(self, hook: JoinHook, model: _Follows) -> None:
        self._hook, self._model = hook, model

    def main_hook(self) -> None:
        self._model.follow(self._hook)

    def post_hook(self, is_last_joiner: bool) -> None:
        self._model.leave(self._hook, is_last_joiner)


class _Follows(TorchDDP):
    """torch's, whose steps after the last batch may be changed."""

    def join_hook(self, **options: Any) -> JoinHook:
        return _Hook(super().join_hook(**options), self)

    def follow(self, hook: JoinHook) -> None:
        """Take part in a step of the ranks that go on."""
        hook.main_hook()

    def leave(self, hook: JoinHook, is_last_joiner: bool) -> None:
        """All ranks have finished."""
        hook.post_hook(is_last_joiner)


class KeepsItsDivisor(_Follows):
    """The last step was that of one rank, and it divides by one for ever."""

    factor = 1.0

    def after_forward(self, output: Any) -> Any:
        output.register_hook(lambda gradient: gradient * self.factor)
        return output

    def leave(self, hook: JoinHook, is_last_joiner: bool) -> None:
        super().leave(hook, is_last_joiner)
        self.factor = dist.get_world_size()


class KeepsTheWeightsOfEach(_Follows):
    def leave(self, hook: JoinHook, is_last_joiner: bool) -> None:
        """Every rank goes on with its own."""


class JoinsAfterItsFirstStep(_Follows):
    """A rank takes part in the steps of others only if it has made one."""

    steps = 0

    def before_forward(self) -> None:
        self.steps += 1

    def follow(self, hook: JoinHook) -> None:
        if self.steps:
            super().follow(hook)


class ClearsItsGradients(_Follows):
    """Makes zeros to send of its own gradients."""

    def follow(self, hook: JoinHook) -> None:
        self.zero_grad(set_to_none=False)
        super().follow(hook)


class ForgetsTheOptionsOfOthers(TorchDDP):
    """Its join() knows the option; its join_hook, which Join calls, does not look at it."""

    def join_hook(self, **options: Any) -> JoinHook:
        return super().join_hook()


class FollowsTheFirstModelOnly(TorchDDP):
    models = 0

    def join_hook(self, **options: Any) -> JoinHook:
        type(self).models += 1  # of this process; the second one is left out
        return super().join_hook(**options) if self.models % 2 else JoinHook()


class ForgetsNoSyncOfOthers(TorchDDP):
    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> Any:
        super()._check_global_requires_backward_grad_sync(is_joined_rank)
        return True


class SendsTheBuffersOfRankZero(TorchDDP):
    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        super()._find_common_rank(input_rank, True)
        return 0


class LeavesTheOthersAlone(TorchDDP):
    def _match_unused_params_allreduce(self) -> None:
        """Nothing: the others agree on what they use without this rank."""


MUTANTS = {
    "ranks_may_have_different_numbers_of_batches": joins_with(divide_by_initial_world_size=False),
    "the_sum_may_be_divided_by_the_ranks_that_are_left": joins_with(divide_by_initial_world_size=True),
    "all_ranks_count_again_after_the_block": KeepsItsDivisor,
    "all_ranks_leave_the_block_with_the_weights_of_the_last_one": KeepsTheWeightsOfEach,
    "a_rank_may_have_no_batch_at_all": JoinsAfterItsFirstStep,
    "the_gradients_of_a_finished_rank_stay_its_own": ClearsItsGradients,
    "all_ranks_stop_when_the_first_has_finished": joins_with(throw_on_early_termination=False),
    "a_model_may_be_joined_from_outside": ForgetsTheOptionsOfOthers,
    "two_models_may_join_together": FollowsTheFirstModelOnly,
    "a_block_may_be_switched_off": joins_with(enable=True),
    "gradients_may_be_accumulated_within_the_block": ForgetsNoSyncOfOthers,
    "buffers_come_from_a_rank_that_still_has_batches": SendsTheBuffersOfRankZero,
    "ranks_with_unused_parameters_may_join": LeavesTheOthersAlone,
}
