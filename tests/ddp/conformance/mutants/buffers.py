"""Mutants for the checks of buffers."""

# mypy: disable-error-code="no-untyped-call, no-any-return"
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

from tests.ddp.conformance.mutant_bases import TorchDDP


class NeverSendsAtConstruction(TorchDDP):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        if options.get("forward_sync_buffers") is False:
            options = {"broadcast_buffers": False}
        super().__init__(module, **options)


class AlwaysSendsAtConstruction(TorchDDP):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        if "broadcast_buffers" in options:
            options["forward_sync_buffers"] = options.pop("broadcast_buffers")
        super().__init__(module, **options)


class SendsAfterForward(TorchDDP):
    def _check_sync_bufs_pre_fwd(self) -> bool:
        return False

    def _check_sync_bufs_post_fwd(self) -> bool:
        return self.will_sync_module_buffers()


class AlwaysSends(TorchDDP):
    def prepare(self) -> None:
        self.forward_sync_buffers = True


class AveragesTheBuffers(TorchDDP):
    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        for buffer in self.modules_buffers:
            if buffer.is_floating_point():
                dist.all_reduce(buffer.div_(dist.get_world_size()))


class SendsFloats(TorchDDP):
    def _distributed_broadcast_coalesced(self, tensors: Any, buffer_size: int, authoritative_rank: int = 0) -> None:
        for tensor in tensors:
            value = tensor.float()
            dist.broadcast(value, src=authoritative_rank)
            tensor.copy_(value)


class SendsTheStateDict(TorchDDP):
    def _assign_modules_buffers(self) -> None:
        super()._assign_modules_buffers()
        saved = self.module.state_dict()
        self.modules_buffers = [buffer for name, buffer in self.named_module_buffers.items() if name in saved]


class RemembersItsBuffers(TorchDDP):
    def _assign_modules_buffers(self) -> None:
        if not hasattr(self, "modules_buffers"):
            super()._assign_modules_buffers()


class ChangesSavedBuffers(TorchDDP):
    def _sync_buffers(self) -> None:
        with torch.no_grad():
            for buffer in self.modules_buffers:
                sent = buffer.clone()
                dist.broadcast(sent, src=0)
                buffer.copy_(sent)


class IgnoresParametersOnly(TorchDDP):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        names = {name for name, _ in module.named_parameters()}
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", [])
        if ignored:
            module._ddp_params_and_buffers_to_ignore = names & set(ignored)  # type: ignore[assignment]
        super().__init__(module, **options)


class SendsWithGradientsOnly(TorchDDP):
    def will_sync_module_buffers(self) -> bool:
        return super().will_sync_module_buffers() and torch.is_grad_enabled()


class SendsInEveryPass(TorchDDP):
    def will_sync_module_buffers(self) -> bool:
        return self.forward_sync_buffers and len(self.modules_buffers) > 0


class SendsInEveryMicroStep(TorchDDP):
    def will_sync_module_buffers(self) -> bool:
        self.require_forward_param_sync |= torch.is_grad_enabled()
        return super().will_sync_module_buffers()


class SendsBeforeTheHook(TorchDDP):
    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        self._default_broadcast_coalesced()
        super()._sync_module_buffers(authoritative_rank)


class RunsAllHooksBeforeForward(TorchDDP):
    def _register_buffer_comm_hook(self, state: Any, hook: Any, comm_hook_location: Any = None) -> None:
        super()._register_buffer_comm_hook(state, hook, _BufferCommHookLocation.PRE_FORWARD)


MUTANTS: dict[str, Any] = {
    "buffers_are_rank_zeros_after_wrapping": NeverSendsAtConstruction,
    "buffers_may_be_each_ranks_own_from_the_start": AlwaysSendsAtConstruction,
    "rank_zeros_buffers_are_sent_before_each_forward_pass": SendsAfterForward,
    "buffers_may_go_their_own_ways": AlwaysSends,
    "batchnorm_goes_on_from_the_statistics_of_rank_zero": AveragesTheBuffers,
    "buffers_of_integers_and_flags_are_sent": SendsFloats,
    "buffers_that_are_not_saved_are_sent_too": SendsTheStateDict,
    "a_buffer_that_the_module_replaces_is_sent": RemembersItsBuffers,
    "a_buffer_may_be_sent_while_an_earlier_pass_needs_it": ChangesSavedBuffers,
    "buffers_to_ignore_are_each_ranks_own": IgnoresParametersOnly,
    "evaluation_begins_with_the_buffers_of_rank_zero": SendsWithGradientsOnly,
    "later_passes_of_an_evaluation_send_nothing": SendsInEveryPass,
    "buffers_are_not_sent_between_micro_steps": SendsInEveryMicroStep,
    "a_hook_may_synchronize_the_buffers_before_forward": SendsBeforeTheHook,
    "a_hook_may_synchronize_the_buffers_after_forward": RunsAllHooksBeforeForward,
}
