"""Mutants for the checks of join."""

# mypy: disable-error-code="no-untyped-call, no-any-return, override"
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from tests.ddp.conformance.mutant_bases import TorchDDP


class DividesByTheRest(TorchDDP):
    def join(self, divide_by_initial_world_size: bool = True, *options: Any, **more: Any) -> Join:
        return super().join(False, *options, **more)


class DividesByAll(TorchDDP):
    def join(self, divide_by_initial_world_size: bool = True, *options: Any, **more: Any) -> Join:
        return super().join(True, *options, **more)


class _Hook(JoinHook):
    """Another hook, of which a part is replaced."""

    def __init__(self, hook: JoinHook) -> None:
        self._hook = hook

    def main_hook(self) -> None:
        self._hook.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._hook.post_hook(is_last_joiner)


class KeepsItsDivisor(TorchDDP):
    factor = 1.0

    def after_forward(self, output: Any) -> Any:
        output.register_hook(lambda gradient: gradient * self.factor)
        return output

    def join_hook(self, **options: Any) -> JoinHook:
        hook, model = super().join_hook(**options), self

        class Hook(_Hook):
            def post_hook(self, is_last_joiner: bool) -> None:
                super().post_hook(is_last_joiner)
                model.factor = dist.get_world_size()  # that of the last step, which one rank made

        return Hook(hook)


class KeepsTheWeightsOfEach(TorchDDP):
    class Hook(_Hook):
        def post_hook(self, is_last_joiner: bool) -> None:
            pass

    def join_hook(self, **options: Any) -> JoinHook:
        return self.Hook(super().join_hook(**options))


class JoinsAfterItsFirstStep(TorchDDP):
    """A rank takes part in the steps of others only if it has made one."""

    steps = 0

    def before_forward(self) -> None:
        self.steps += 1

    def join_hook(self, **options: Any) -> JoinHook:
        hook, model = super().join_hook(**options), self

        class Hook(_Hook):
            def main_hook(self) -> None:
                if model.steps:
                    super().main_hook()

        return Hook(hook)


class ClearsItsGradients(TorchDDP):
    def join_hook(self, **options: Any) -> JoinHook:
        hook, model = super().join_hook(**options), self

        class Hook(_Hook):
            def main_hook(self) -> None:
                model.zero_grad(set_to_none=False)  # these are the zeros to send
                super().main_hook()

        return Hook(hook)


class GoesOnWithFewerRanks(TorchDDP):
    def join(self, divide_by_initial_world_size: bool = True, enable: bool = True, **_: Any) -> Join:
        return super().join(divide_by_initial_world_size, enable)


class ForgetsTheOptionsOfOthers(TorchDDP):
    """Its join() knows the option; its join_hook, which Join calls, does not look at it."""

    def join_hook(self, **options: Any) -> JoinHook:
        return super().join_hook()


class FollowsTheFirstModelOnly(TorchDDP):
    models = 0

    def join_hook(self, **options: Any) -> JoinHook:
        type(self).models += 1  # of this process; the second one is left out
        return super().join_hook(**options) if self.models % 2 else JoinHook()


class CannotBeSwitchedOff(TorchDDP):
    def join(self, divide_by_initial_world_size: bool = True, enable: bool = True, *options: Any, **more: Any) -> Join:
        return super().join(divide_by_initial_world_size, True, *options, **more)


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


class ClaimsToUseAll(TorchDDP):
    def _match_unused_params_allreduce(self) -> None:
        dist.all_reduce(torch.ones_like(self.reducer._get_local_used_map()))


MUTANTS: dict[str, Any] = {
    "ranks_may_have_different_numbers_of_batches": DividesByTheRest,
    "the_sum_may_be_divided_by_the_ranks_that_are_left": DividesByAll,
    "all_ranks_count_again_after_the_block": KeepsItsDivisor,
    "all_ranks_leave_the_block_with_the_weights_of_the_last_one": KeepsTheWeightsOfEach,
    "a_rank_may_have_no_batch_at_all": JoinsAfterItsFirstStep,
    "the_gradients_of_a_finished_rank_stay_its_own": ClearsItsGradients,
    "all_ranks_stop_when_the_first_has_finished": GoesOnWithFewerRanks,
    "a_model_may_be_joined_from_outside": ForgetsTheOptionsOfOthers,
    "two_models_may_join_together": FollowsTheFirstModelOnly,
    "a_block_may_be_switched_off": CannotBeSwitchedOff,
    "gradients_may_be_accumulated_within_the_block": ForgetsNoSyncOfOthers,
    "buffers_come_from_a_rank_that_still_has_batches": SendsTheBuffersOfRankZero,
    "ranks_with_unused_parameters_may_join": LeavesTheOthersAlone,
    "a_finished_rank_uses_no_parameter": ClaimsToUseAll,
}
