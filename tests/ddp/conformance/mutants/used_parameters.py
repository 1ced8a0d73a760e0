"""Mutants for the checks of the parameters that a pass uses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _find_tensors

from tests.ddp.conformance.mutant_bases import AverageEach, TorchDDP, users


class DividesByTheUsers(AverageEach):
    def _average_gradients(self) -> None:
        numbers = users(self.used())
        super()._average_gradients()
        for parameter, number in zip(self.module.parameters(), numbers, strict=True):
            assert parameter.grad is not None
            parameter.grad *= dist.get_world_size() / max(number, 1)
        self.keep([number > 0 for number in numbers])


class ZerosForUnused(AverageEach):
    """Right but for that."""


class FollowsRankZero(AverageEach):
    def _average_gradients(self) -> None:
        flags = torch.tensor(self.used())
        super()._average_gradients()
        dist.broadcast(flags, src=0)
        self.keep(flags.tolist())


class RemembersTheFirstStep(AverageEach):
    receivers: list[bool] | None = None

    def _average_gradients(self) -> None:
        if self.receivers is None:
            self.receivers = [number > 0 for number in users(self.used())]
        super()._average_gradients()
        self.keep(self.receivers)


class DropsUnused(TorchDDP):
    def forward(self, *inputs: Any) -> Any:
        output = super().forward(*inputs)
        assert isinstance(self.module, nn.Module)
        for index, branch in enumerate(self.module.branches):  # type: ignore[arg-type]
            if index not in inputs[1:]:
                branch.zero_grad()
        return output


class KnowsTheLastPassOnly(AverageEach):
    last: set[int]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.last = set(inputs[1:])
        return super().forward(*inputs, **kwargs)

    def _average_gradients(self) -> None:
        own = [None if p.grad is None else p.grad.clone() for p in self.module.parameters()]
        super()._average_gradients()
        for index, (parameter, gradient) in enumerate(zip(self.module.parameters(), own, strict=True)):
            if index // 2 not in self.last:
                parameter.grad = gradient


class WaitsForEveryOutput(TorchDDP):
    def _post_forward(self, output: Any) -> Any:
        self.reducer.prepare_for_backward(list(_find_tensors(output)))
        return output


class LooksIntoTuplesOnly(TorchDDP):
    def _post_forward(self, output: Any) -> Any:
        tensors = list(output) if isinstance(output, tuple) else [output] if isinstance(output, torch.Tensor) else []
        self.reducer.prepare_for_backward(tensors)
        return output


class SkipsWithoutADivision(TorchDDP):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        if options.get("skip_all_reduce_unused_params"):
            self.register_comm_hook(None, _sum)


def _sum(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with types
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


MUTANTS: dict[str, Any] = {
    "a_parameter_that_one_rank_leaves_out_counts_as_zeros_there": DividesByTheUsers,
    "a_parameter_that_no_rank_uses_stays_without_gradient": ZerosForUnused,
    "each_rank_may_use_other_parameters": FollowsRankZero,
    "the_used_parameters_may_change_from_step_to_step": RemembersTheFirstStep,
    "an_old_gradient_stays_as_it_is_where_no_rank_uses_the_parameter": DropsUnused,
    "a_parameter_that_was_used_only_under_no_sync_is_averaged_too": KnowsTheLastPassOnly,
    "an_output_may_be_left_out_of_the_loss": WaitsForEveryOutput,
    "used_parameters_are_found_behind_outputs_in_containers": LooksIntoTuplesOnly,
    "unused_parameters_that_are_the_same_everywhere_need_not_be_sent": SkipsWithoutADivision,
}


class RecordsWithoutSending(AverageEach):
    first = True

    def _average_gradients(self) -> None:
        if not self.first:
            super()._average_gradients()
        self.first = False


class MixesUpAfterTheFirstStep(AverageEach):
    first = True

    def _average_gradients(self) -> None:
        super()._average_gradients()
        if not self.first:
            one, other = [p.grad for p in self.module.parameters() if p.shape == (3, 3)][:2]
            assert one is not None
            assert other is not None
            one[:], other[:] = other.clone(), one.clone()
        self.first = False


class GivesToUsersOnly(AverageEach):
    def _average_gradients(self) -> None:
        used = self.used()
        super()._average_gradients()
        self.keep(used)


class SendsAtTheFirstUse(nn.Module):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._average)

    def forward(self, *inputs: Any) -> Any:
        self._done: set[Tensor] = set()
        return self.module(*inputs)

    def _average(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if parameter not in self._done:
            self._done.add(parameter)
            dist.all_reduce(parameter.grad.div_(dist.get_world_size()))


class OnlySetsTheFlag(TorchDDP):
    def _set_static_graph(self) -> None:
        self.static_graph, self._static_graph_delay_allreduce_enqueued = True, True


class ForgetsNoSync(TorchDDP):
    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


class TakesTheFirstPassForTheRecord(AverageEach):
    """Only the pass after the first one begins to synchronize, whichever was under no_sync."""

    passes = 0

    def _prepare_for_backward(self, output: Any) -> None:
        self.passes += 1
        if self.passes > 1:
            super()._prepare_for_backward(output)


MUTANTS |= {
    "the_first_step_of_a_static_graph_is_averaged_too": RecordsWithoutSending,
    "a_static_graph_trains_as_a_dynamic_one": MixesUpAfterTheFirstStep,
    "a_static_graph_may_have_unused_parameters": ZerosForUnused,
    "ranks_may_have_different_static_graphs": GivesToUsersOnly,
    "a_layer_of_two_checkpoints_is_averaged_with_both_uses": SendsAtTheFirstUse,
    "a_graph_may_be_declared_static_after_wrapping": OnlySetsTheFlag,
    "a_static_graph_accumulates_after_its_first_step": ForgetsNoSync,
    "a_static_graph_may_begin_under_no_sync": TakesTheFirstPassForTheRecord,
}
