"""Mutants for the checks of parameters of every kind."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tests.ddp.conformance.mutant_bases import AverageEach


class DividesByName(AverageEach):
    """A weight with two names is divided twice."""

    def finish(self) -> None:
        for _, parameter in self.module.named_parameters(remove_duplicate=False):
            parameter.grad /= dist.get_world_size()
        for parameter in self.trained:
            dist.all_reduce(parameter.grad)


class DividesByTheCalls(AverageEach):
    """A layer's gradient is divided by how often forward has called the layer."""

    def prepare(self) -> None:
        self.calls: Counter[Any] = Counter()
        for layer in self.module.modules():
            layer.register_forward_hook(self.count)

    def count(self, layer: nn.Module, *_: Any) -> None:
        """The layer is called."""
        self.calls[layer] += 1

    def finish(self) -> None:
        super().finish()
        for layer, calls in self.calls.items():
            for parameter in layer.parameters(recurse=False):
                assert parameter.grad is not None
                parameter.grad.div_(calls)
        self.calls.clear()


class TrainsTheFrozen(AverageEach):
    """Does not look at requires_grad."""

    def prepare(self) -> None:
        self.trained = list(self.module.parameters())


class SumsTheValuesOfRows(AverageEach):
    """Ranks with as many rows; but which rows is not looked at."""

    def average(self, gradient: Tensor) -> None:
        super().average(gradient._values())


class SparseOnly(AverageEach):
    """Has one kind of bucket where a module has sparse gradients."""

    def average(self, gradient: Tensor) -> None:
        if gradient.is_sparse:
            super().average(gradient)


class SkipsParameterLists(AverageEach):
    """Takes the parameters of layers."""

    def prepare(self) -> None:
        layers = [
            layer for layer in self.module.modules() if not isinstance(layer, nn.ParameterList | nn.ParameterDict)
        ]
        self.trained = [parameter for layer in layers for parameter in layer.parameters(recurse=False)]


class AveragesTheRealPart(AverageEach):
    """Leaves the imaginary part as it is."""

    def average(self, gradient: Tensor) -> None:
        part = gradient.real.clone()
        super().average(part)
        gradient.real.copy_(part)


class SumsInBfloat16(AverageEach):
    """Sends what autocast computes in."""

    def average(self, gradient: Tensor) -> None:
        sent = gradient.bfloat16()
        super().average(sent)
        gradient.copy_(sent)


MUTANTS = {
    "a_weight_of_two_layers_is_averaged_once": DividesByName,
    "a_layer_that_is_called_twice_is_averaged_with_both_uses": DividesByTheCalls,
    "frozen_parameters_get_no_gradient": TrainsTheFrozen,
    "frozen_parameters_are_not_sent": TrainsTheFrozen,
    "sparse_gradients_are_averaged_row_by_row": SumsTheValuesOfRows,
    "sparse_and_dense_gradients_travel_side_by_side": SparseOnly,
    "parameters_outside_of_layers_are_averaged": SkipsParameterLists,
    "complex_gradients_are_averaged": AveragesTheRealPart,
    "autocast_leaves_the_averages_in_float32": SumsInBfloat16,
}
