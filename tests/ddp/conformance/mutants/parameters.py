"""Mutants for the checks of parameters of every kind."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ddp.conformance.mutant_bases import AverageEach, TorchDDP


class AveragesByName(AverageEach):
    def _average_gradients(self) -> None:
        super()._average_gradients()  # the sum of the shared weight is divided once more for its second name
        names = list(self.module.named_parameters(remove_duplicate=False))
        for index, (_, parameter) in enumerate(names):
            if any(parameter is other for _, other in names[:index]) and parameter.grad is not None:
                parameter.grad /= dist.get_world_size()


class DividesByTheCalls(AverageEach):
    def prepare(self) -> None:
        for layer in self.module.modules():
            layer.register_forward_hook(self._count)

    def before_forward(self) -> None:
        self.calls: dict[nn.Module, int] = {}

    def _count(self, layer: nn.Module, *_: Any) -> None:
        self.calls[layer] = self.calls.get(layer, 0) + 1

    def _average_gradients(self) -> None:
        super()._average_gradients()
        for layer, calls in self.calls.items():
            for parameter in layer.parameters(recurse=False):
                assert parameter.grad is not None
                parameter.grad /= calls


class TrainsTheFrozen(AverageEach):
    def _average_gradients(self) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        super()._average_gradients()


class SendsTheFrozen(TorchDDP):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        super().__init__(module, **options | {"find_unused_parameters": bool(frozen)})
        for parameter in frozen:
            parameter.requires_grad_(False)


class SumsTheValuesOfRows(AverageEach):
    """Ranks with as many rows; but which rows is not looked at."""

    def _average_gradients(self) -> None:
        for parameter in self.module.parameters():
            gradient = parameter.grad
            assert gradient is not None
            gradient = gradient.coalesce() if gradient.is_sparse else gradient
            values = gradient.values() if gradient.is_sparse else gradient
            dist.all_reduce(values.div_(dist.get_world_size()))
            parameter.grad = gradient


class SendsOneKindOnly(TorchDDP):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        names = [name for name, layer in module.named_modules() if getattr(layer, "sparse", False)]
        dense = [name for name, _ in module.named_parameters() if name.rpartition(".")[0] not in names]
        self._set_params_and_buffers_to_ignore_for_model(module, dense if names and len(names) < len(dense) else [])  # type: ignore[no-untyped-call, unused-ignore]
        super().__init__(module, **options)


class SkipsParameterLists(TorchDDP):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        kinds = (nn.ParameterList, nn.ParameterDict)
        lists = tuple(f"{name}." for name, layer in module.named_modules() if isinstance(layer, kinds))
        ignored = [name for name, _ in module.named_parameters() if name.startswith(lists)]
        self._set_params_and_buffers_to_ignore_for_model(module, ignored)  # type: ignore[no-untyped-call, unused-ignore]
        super().__init__(module, **options)


class AveragesTheRealPart(AverageEach):
    def _average_gradients(self) -> None:
        for parameter in self.module.parameters():
            assert parameter.grad is not None
            part: Tensor = parameter.grad.real.clone() if parameter.is_complex() else parameter.grad
            dist.all_reduce(part.div_(dist.get_world_size()))
            if parameter.is_complex():
                parameter.grad.real.copy_(part)


class NeverSendsTheDelayed(TorchDDP):
    def _delayed_all_reduce_hook(self, grad: Tensor) -> Tensor:
        return grad


MUTANTS: dict[str, Any] = {
    "a_weight_of_two_layers_is_averaged_once": AveragesByName,
    "a_layer_that_is_called_twice_is_averaged_with_both_uses": DividesByTheCalls,
    "frozen_parameters_get_no_gradient": TrainsTheFrozen,
    "frozen_parameters_are_not_sent": SendsTheFrozen,
    "sparse_gradients_are_averaged_row_by_row": SumsTheValuesOfRows,
    "sparse_and_dense_gradients_travel_side_by_side": SendsOneKindOnly,
    "parameters_outside_of_layers_are_averaged": SkipsParameterLists,
    "complex_gradients_are_averaged": AveragesTheRealPart,
    "the_all_reduce_of_some_parameters_may_be_delayed": NeverSendsTheDelayed,
}


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


MUTANTS |= {
    "autocast_leaves_the_averages_in_float32": SumsInBfloat16,
    "an_overflow_on_one_rank_skips_the_step_on_all": RepairsGradients,
    "clipping_after_unscaling_is_that_of_one_process": Sums,
    "clipping_gives_all_ranks_the_same": GivesRankZeroTheAverages,
}
