"""Mutants for the checks of process groups."""

# mypy: disable-error-code="no-untyped-call, no-any-return"
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from tests.ddp.conformance.mutant_bases import TorchDDP


class CopiesFromRankZeroOfTheWorld(TorchDDP):
    def __init__(self, module: nn.Module, process_group: Any = None, **options: Any) -> None:
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        super().__init__(module, process_group=process_group, **options)


class LooksPastTheMesh(TorchDDP):
    def __init__(self, module: nn.Module, device_mesh: Any = None, **options: Any) -> None:
        super().__init__(module, **options)


class DividesByTheWorld(TorchDDP):
    def prepare(self) -> None:
        factor = self.process_group.size() / dist.get_world_size()
        if factor != 1.0:
            self.register_comm_hook((self.process_group, factor / self.process_group.size()), _average)


def _average(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with types
    group, factor = state
    buffer = bucket.buffer().mul_(factor)
    return dist.all_reduce(buffer, group=group, async_op=True).get_future().then(lambda future: future.value()[0])


class HasOneGroupForAll(TorchDDP):
    """A class attribute where an instance's belongs: the last wrapper's group is that of all."""

    group: ClassVar[Any] = None

    def prepare(self) -> None:
        HasOneGroupForAll.group = self.process_group
        self.register_comm_hook(None, _average_in_the_last_group)


def _average_in_the_last_group(state, bucket):  # type: ignore[no-untyped-def]
    group = HasOneGroupForAll.group
    buffer = bucket.buffer().div_(group.size())
    return dist.all_reduce(buffer, group=group, async_op=True).get_future().then(lambda future: future.value()[0])


class HasOneSwitchForAll(TorchDDP):
    synchronize: ClassVar[bool] = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        HasOneSwitchForAll.synchronize = False
        yield
        HasOneSwitchForAll.synchronize = True

    def before_forward(self) -> None:
        self.require_backward_grad_sync = HasOneSwitchForAll.synchronize


class CountsElements(TorchDDP):
    def _get_ddp_logging_data(self) -> dict[str, Any]:
        elements = sum(parameter.numel() for parameter in self.module.parameters())
        return super()._get_ddp_logging_data() | {"total_parameter_size_bytes": elements}


class TakesTheFirstDevice(TorchDDP):
    def __init__(self, module: nn.Module, device_ids: Any = None, **options: Any) -> None:
        if device_ids is not None:
            module = module.to(torch.device("cuda", device_ids[0]))
        super().__init__(module, device_ids=device_ids, **options)


MUTANTS: dict[str, Any] = {
    "a_group_has_the_buffers_of_its_own_first_rank": CopiesFromRankZeroOfTheWorld,
    "a_device_mesh_is_a_group": LooksPastTheMesh,
    "one_rank_is_a_group_too": DividesByTheWorld,
    "two_groups_may_share_a_backward_pass": HasOneGroupForAll,
    "two_wrappers_do_not_know_each_other": HasOneSwitchForAll,
    "logged_numbers_are_true": CountsElements,
    "an_empty_list_of_devices_is_accepted": TakesTheFirstDevice,
}
