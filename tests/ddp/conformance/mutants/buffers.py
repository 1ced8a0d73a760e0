"""Mutants for the checks of buffers."""

# mypy: disable-error-code="no-untyped-call, no-any-return"
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.ddp.conformance.mutant_bases import TorchDDP, torch_with, torch_without


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


MUTANTS = {
    "buffers_are_rank_zeros_after_wrapping": torch_with(broadcast_buffers=False),
    "buffers_may_be_each_ranks_own_from_the_start": torch_without("broadcast_buffers"),
    "rank_zeros_buffers_are_sent_before_each_forward_pass": torch_with(forward_sync_buffers=False),
    "buffers_may_go_their_own_ways": torch_without("forward_sync_buffers"),
    "batchnorm_goes_on_from_the_statistics_of_rank_zero": AveragesTheBuffers,
    "buffers_of_integers_and_flags_are_sent": SendsFloats,
    "buffers_that_are_not_saved_are_sent_too": SendsTheStateDict,
    "a_buffer_that_the_module_replaces_is_sent": RemembersItsBuffers,
    "a_buffer_may_be_sent_while_an_earlier_pass_needs_it": ChangesSavedBuffers,
    "evaluation_begins_with_the_buffers_of_rank_zero": SendsWithGradientsOnly,
    "later_passes_of_an_evaluation_send_nothing": SendsInEveryPass,
    "buffers_are_not_sent_between_micro_steps": SendsInEveryMicroStep,
}
