"""Wrappers that begin with unequal replicas, or do not see that they are unequal."""

# ruff: noqa: RUF012
from __future__ import annotations

import copy
import itertools
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tests.ddp.conformance.mutant_bases import AverageEach, TorchDDP


class NoBroadcast(TorchDDP):
    """Trusts that all ranks were seeded alike."""

    overrides = {"init_sync": False}


class _SendsSome(TorchDDP):
    """Sends the tensors that ``chosen`` returns."""

    overrides = {"init_sync": False}

    def prepare(self) -> None:
        for tensor in self.chosen(self.module):
            dist.broadcast(tensor.detach(), src=0)

    def chosen(self, module: nn.Module) -> Any:
        return module.parameters()


class ParametersOnly(_SendsSome):
    """Sends no buffers."""


class FloatsOnly(_SendsSome):
    """Sends what has gradients, and the buffers."""

    def chosen(self, module: nn.Module) -> Any:
        return itertools.chain((p for p in module.parameters() if p.requires_grad), module.buffers())


class AlwaysSends(TorchDDP):
    """Ignores init_sync."""

    def __init__(self, module: nn.Module, init_sync: bool = True, **options: Any) -> None:
        super().__init__(module, **options)


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


class OwnModeOnly(TorchDDP):
    """Switches its own mode, not the module's."""

    def train(self, mode: bool = True) -> Any:
        self.training = mode
        return self


class IgnoresTheIgnored(TorchDDP):
    """Sends everything at the start."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        super().__init__(module, **options)


class AveragesTheIgnored(AverageEach):
    """Averages all gradients, those of ignored parameters too."""


class NoVerification(TorchDDP):
    """Sends the weights of rank 0 only where they fit, without a word."""

    overrides = {"init_sync": False}


class _Compares(NoVerification):
    """Compares what ``described`` returns."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [self.described(parameter) for parameter in module.parameters()])
        for theirs in everyone:
            if any(one != other for one, other in zip(theirs, everyone[0], strict=False)):
                raise RuntimeError(f"the ranks' modules differ: {everyone}")
        super().__init__(module, **options)

    def described(self, parameter: Tensor) -> Any:
        return parameter.shape


class ComparesTheFirst(_Compares):
    """Compares as many parameters as both have."""


class ComparesShapes(_Compares):
    """Compares shapes, not dtypes."""


class ComparesTensors(_Compares):
    """Compares shapes and dtypes, not which have gradients."""

    def described(self, parameter: Tensor) -> Any:
        return parameter.shape, parameter.dtype


class SaysOnlyThat(TorchDDP):
    """Says that something differs."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        sizes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sizes, sum(parameter.numel() for parameter in module.parameters()))
        if len(set(sizes)) > 1:
            raise RuntimeError("the ranks' modules differ")
        super().__init__(module, **options)


class ComparesWithoutNames(TorchDDP):
    """torch's own way: shapes and strides in the order of the parameters."""


class AlwaysEveryone(TorchDDP):
    """Ignores process_group."""

    def __init__(self, module: nn.Module, process_group: Any = None, **options: Any) -> None:
        super().__init__(module, **options)


class FirstOfTheWorld(TorchDDP):
    """Sends the weights of rank 0, whatever the group."""

    def __init__(self, module: nn.Module, process_group: Any = None, **options: Any) -> None:
        super().__init__(module, process_group=process_group, **options | {"init_sync": False})
        for tensor in module.parameters():
            dist.broadcast(tensor.detach(), 0)


class NewestGroup(TorchDDP):
    """Takes the group that was made last for the default."""

    def __init__(self, module: nn.Module, process_group: Any = None, **options: Any) -> None:
        groups = list(dist.distributed_c10d._world.pg_map)
        super().__init__(module, process_group=process_group or groups[-1], **options)


class HooksStay(TorchDDP):
    """Its hooks on the parameters outlive it, and each divides."""

    def prepare(self) -> None:
        first = next(self.module.parameters())
        wrappers = getattr(first, "wrappers", 0)
        first.wrappers = wrappers + 1  # type: ignore[attr-defined]
        if wrappers:
            for parameter in self.module.parameters():
                parameter.register_hook(lambda gradient: gradient / dist.get_world_size())


MUTANTS: dict[str, type[nn.Module]] = {
    "weights_become_those_of_rank_0": NoBroadcast,
    "buffers_become_those_of_rank_0": ParametersOnly,
    "frozen_parameters_become_those_of_rank_0": FloatsOnly,
    "without_init_sync_the_weights_stay": AlwaysSends,
    "weights_are_sent_into_the_module_s_own_tensors": NewTensors,
    "the_module_is_at_module": Copies,
    "names_in_the_state_dict_begin_with_module": WithoutPrefix,
    "a_loaded_state_dict_is_what_is_trained": RestoresItsWeights,
    "train_and_eval_reach_the_module": OwnModeOnly,
    "ignored_tensors_are_not_sent": IgnoresTheIgnored,
    "ignored_parameters_keep_their_own_gradients": AveragesTheIgnored,
    "differing_shapes_are_refused_by_all_ranks": NoVerification,
    "differing_numbers_of_parameters_are_refused_by_all_ranks": ComparesTheFirst,
    "differing_dtypes_are_refused_by_all_ranks": ComparesShapes,
    "differing_frozen_parameters_are_refused_by_all_ranks": ComparesTensors,
    "the_error_of_differing_modules_names_the_rank": SaysOnlyThat,
    "equal_shapes_under_other_names_are_refused": ComparesWithoutNames,
    "averages_are_over_the_given_group": AlwaysEveryone,
    "weights_are_those_of_the_group_s_first_rank": FirstOfTheWorld,
    "the_default_group_is_the_default": NewestGroup,
    "a_second_wrapper_may_follow_the_first": HooksStay,
}
