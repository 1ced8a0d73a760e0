"""Mutants for the checks of process groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn

from tests.ddp.conformance.mutant_bases import TorchDDP, torch_without


class CopiesFromRankZeroOfTheWorld(TorchDDP):
    def prepare(self) -> None:
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            dist.broadcast(tensor.detach(), src=0)


class DividesByTheWorld(TorchDDP):
    def prepare(self) -> None:
        factor = self.process_group.size() / dist.get_world_size()
        for parameter in self.module.parameters():
            parameter.register_hook(lambda gradient: gradient * factor)


class HasOneSwitchForAll(TorchDDP):
    """A class attribute where an instance's belongs."""

    synchronize: ClassVar[bool] = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        HasOneSwitchForAll.synchronize = False
        yield
        HasOneSwitchForAll.synchronize = True

    def before_forward(self) -> None:
        self.require_backward_grad_sync = HasOneSwitchForAll.synchronize


class TakesTheFirstDevice(TorchDDP):
    def __init__(self, module: nn.Module, device_ids: Any = None, **options: Any) -> None:
        device = None if device_ids is None else device_ids[0]
        super().__init__(module, device_ids=device, **options)


MUTANTS = {
    "averages_are_over_the_given_group": torch_without("process_group"),
    "weights_are_those_of_the_group_s_first_rank": CopiesFromRankZeroOfTheWorld,
    "a_group_has_the_buffers_of_its_own_first_rank": CopiesFromRankZeroOfTheWorld,
    "a_device_mesh_is_a_group": torch_without("device_mesh"),
    "one_rank_is_a_group_too": DividesByTheWorld,
    "two_groups_may_share_a_backward_pass": torch_without("process_group"),
    "two_wrappers_do_not_know_each_other": HasOneSwitchForAll,
    "an_empty_list_of_devices_is_accepted": TakesTheFirstDevice,
}
