"""Wrappers that begin with unequal replicas, or do not see that they are unequal."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from ddp.conformance.steps import of_all_ranks
from tests.ddp.conformance.mutant_bases import TorchDDP, torch_with, torch_without


class _KeepsSome(TorchDDP):
    """Some parameters keep the rank's own values."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        own = [parameter.detach().clone() for parameter in module.parameters()]
        super().__init__(module, **options)
        for parameter, before in zip(module.parameters(), own, strict=True):
            if self.keeps(parameter):
                parameter.data.copy_(before)

    def keeps(self, parameter: nn.Parameter) -> bool:
        """Whether this is one of them."""
        raise NotImplementedError


class KeepsTheFrozen(_KeepsSome):
    """Sends what has gradients."""

    def keeps(self, parameter: nn.Parameter) -> bool:
        return not parameter.requires_grad


class SendsACopy(_KeepsSome):
    """Receives into contiguous copies of parameters that have gaps in memory."""

    def keeps(self, parameter: nn.Parameter) -> bool:
        return not parameter.is_contiguous()


class NewTensors(TorchDDP):
    """Replaces the parameters' memory by what it received."""

    def prepare(self) -> None:
        for parameter in self.module.parameters():
            parameter.data = parameter.data.clone()


class Copies(TorchDDP):
    """Wraps a copy of the module."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(copy.deepcopy(module), **options)


class WithoutPrefix(TorchDDP):
    """Its state dict is the module's."""

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return self.module.state_dict(*arguments, **options)


class RestoresItsWeights(TorchDDP):
    """Holds the weights from the start, and sends those before each forward pass."""

    def prepare(self) -> None:
        self.first = [parameter.detach().clone() for parameter in self.module.parameters()]

    def before_forward(self) -> None:
        for parameter, first in zip(self.module.parameters(), self.first, strict=True):
            parameter.data.copy_(first)


class _Compares(TorchDDP):
    """Compares what it finds in the ranks' parameters, where torch compares more."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        everyone = of_all_ranks([self.compared(parameter) for parameter in module.parameters()])
        for theirs in everyone:
            if any(one != other for one, other in zip(theirs, everyone[0], strict=False)):
                raise RuntimeError(f"the ranks' modules differ: {everyone}")
        super().__init__(module, **options | {"init_sync": False})

    def compared(self, parameter: nn.Parameter) -> Any:
        """The properties that are compared."""
        return parameter.shape, parameter.dtype, parameter.requires_grad


class ComparesAsManyAsBothHave(_Compares):
    """Does not compare how many there are."""


class ComparesTensors(_Compares):
    """Compares shapes and dtypes, not which have gradients."""

    def compared(self, parameter: nn.Parameter) -> Any:
        return parameter.shape, parameter.dtype


class OwnModeOnly(TorchDDP):
    """Switches its own mode, not the module's."""

    def train(self, mode: bool = True) -> Any:
        self.training = mode
        return self


MUTANTS = {
    "weights_become_those_of_rank_0": torch_with(init_sync=False),
    "frozen_parameters_become_those_of_rank_0": KeepsTheFrozen,
    "without_init_sync_the_weights_stay": torch_without("init_sync"),
    "weights_are_sent_into_the_module_s_own_tensors": NewTensors,
    "the_module_is_at_module": Copies,
    "names_in_the_state_dict_begin_with_module": WithoutPrefix,
    "a_loaded_state_dict_is_what_is_trained": RestoresItsWeights,
    "train_and_eval_reach_the_module": OwnModeOnly,
    "differing_numbers_of_parameters_are_refused_by_all_ranks": ComparesAsManyAsBothHave,
    "differing_frozen_parameters_are_refused_by_all_ranks": ComparesTensors,
    # of another topic
    "parameters_with_gaps_in_memory_are_averaged": SendsACopy,
}
