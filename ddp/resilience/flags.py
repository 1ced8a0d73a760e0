"""Flags that travel with the gradients: what one rank knows, and all must act on in the same step.

A signal reaches one rank; a loss is nan on one; one rank's clock says that it is time to save. If that rank alone left the
loop, the others would wait for it for ever. An all-reduce of the flags in every step would cost a round trip (0.3 to 1.4 ms
over gloo). But every step sums something over the ranks anyway: the gradients. So the flags are the gradient of a parameter
that no optimizer knows, and DDP, torch's or any other, takes them along.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Flags(NamedTuple):
    """What a rank raises, or what any rank has raised.

    :param stop: leave after this step; :param save: write a checkpoint after it
    :param user_error: something is wrong that a person can mend: all must end with its message
    :param not_finite: the loss is inf or nan
    """

    stop: bool = False
    save: bool = False
    user_error: bool = False
    not_finite: bool = False


NO_FLAGS = Flags()


class FlagCarrier(nn.Module):
    """A network with the parameter whose gradient carries the flags. It is what DDP wraps; the network itself, its
    ``state_dict`` and its optimizer know nothing of it."""

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.flags = nn.Parameter(torch.zeros(len(Flags._fields), device=device))
        self.network = network

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The network's output, and the flags' place in the graph, for :func:`raise_flags`."""
        return self.network(images), self.flags.clone()

    def agreed(self) -> Flags:
        """After the backward pass: what was raised on any rank, in any micro-step. The same on every rank."""
        assert self.flags.grad is not None, "no flags were raised in the backward pass"
        values = self.flags.grad.tolist()  # averaged over the ranks and scaled; or nan, which is not 0, either
        self.flags.grad = None
        return Flags(*(value != 0 for value in values))


def raise_flags(loss: Tensor, place: Tensor, mine: Flags) -> Tensor:
    """The same loss, whose backward pass leaves this rank's flags in the carrier's gradient.

    :param loss: 0-d, scaled if it is to be; its ``not_finite`` is found here, on the device
    :param place: what the carrier's forward returned with the logits
    """
    values = torch.zeros_like(place)
    values[Flags._fields.index("not_finite")] = 0 * loss.detach()  # 0, or nan: without the host waiting for the device
    for number, raised in enumerate(mine):
        if raised:
            values[number] = 1
    return loss + torch.dot(place, values)  # the parameter is 0, so this adds 0, and has ``values`` for its gradient
