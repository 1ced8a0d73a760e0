"""Mutants for the checks of static graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tests.ddp.conformance.mutants.bases import AverageEach, TorchDDP


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


class ZerosForUnused(AverageEach):
    """Right but for that."""


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


MUTANTS: dict[str, Any] = {
    "the_first_step_of_a_static_graph_is_averaged_too": RecordsWithoutSending,
    "a_static_graph_trains_as_a_dynamic_one": MixesUpAfterTheFirstStep,
    "a_static_graph_may_have_unused_parameters": ZerosForUnused,
    "ranks_may_have_different_static_graphs": GivesToUsersOnly,
    "a_layer_of_two_checkpoints_is_averaged_with_both_uses": SendsAtTheFirstUse,
    "a_graph_may_be_declared_static_after_wrapping": OnlySetsTheFlag,
    "a_static_graph_accumulates_after_its_first_step": ForgetsNoSync,
    "a_static_graph_may_begin_under_no_sync": TakesTheFirstPassForTheRecord,
}
