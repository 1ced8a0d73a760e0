"""Flags that travel with the gradients: what one rank reports in a step, all ranks know after it.

A signal reaches one rank. A loss is nan on one. One rank's clock says that it is time to save. If that rank alone left the
loop, the others would wait for it forever. An all-reduce of the flags in every step would cost a round trip (0.3 to 1.4 ms
over gloo). But every step all-reduces the gradients anyway. So the flags are the gradient of one more parameter, which no
optimizer knows: they are attached to the loss, and DDP, torch's or any other, all-reduces them with the rest. (A sharded
strategy reduces the network's gradients only: there they take an all-reduce of their own.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Flags(NamedTuple):
    """The report of one rank, or of any rank.

    :param stop: leave after this step
    :param save: write a checkpoint after this step
    :param user_error: all ranks must end with this rank's message
    :param not_finite: the loss is inf or nan
    """

    stop: bool = False
    save: bool = False
    user_error: bool = False
    not_finite: bool = False


NO_FLAGS = Flags()
NOT_FINITE = Flags._fields.index("not_finite")


class WithFlags(nn.Module):
    """A network and the parameter whose gradient carries the flags. This is what DDP wraps; the network itself, its
    ``state_dict`` and its optimizer do not know the parameter."""

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.flags = nn.Parameter(torch.zeros(len(Flags._fields), device=device))
        self.network = network

    def forward(self, *inputs: Any) -> Any:
        """The network's own."""
        return self.network(*inputs)

    def attach(self, loss: Tensor, flags: Flags) -> Tensor:
        """The same loss, whose backward pass leaves this rank's flags in the parameter's gradient.

        A loss that is not finite makes all gradients nan, and so is seen on every rank: GradScaler looks at nothing else,
        and cross-entropy's gradients can be finite where the loss is inf.

        :param loss: 0-d; whether it is finite is found on its device, without the host waiting for it
        :param flags: this rank's; ``not_finite`` is filled in
        """
        zero_or_nan = 0 * loss.detach()
        values = torch.zeros_like(self.flags)
        values[NOT_FINITE] = zero_or_nan
        for number, flag in enumerate(flags):
            if flag:
                values[number] = 1
        # The parameter is 0: the product adds nothing to the loss, and has ``values`` for its gradient.
        return loss * (1 + zero_or_nan) + torch.dot(self.flags, values)

    def take_reduced(self) -> Tensor:
        """After backward: what any rank attached in any micro-step, a number per flag on the device, which is 0 if none did.

        The numbers are averaged over the ranks and scaled; or nan, which differs from 0 too.
        """
        gradient, self.flags.grad = self.flags.grad, None
        assert gradient is not None, "no flags were attached to the loss"
        return gradient
