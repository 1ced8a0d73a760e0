"""Small networks that several topics use."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from ddp.conformance.check import Wrong


def layers(*widths: int, seed: int = 0) -> nn.Sequential:
    """Linear layers with Tanh in between; the same on every rank for one seed."""
    torch.manual_seed(seed)
    linear = [nn.Linear(n, m) for n, m in itertools.pairwise(widths)]
    return nn.Sequential(*[module for layer in linear for module in (layer, nn.Tanh())][:-1])


class Branches(nn.Module):
    """Linear branches, of which a forward pass adds up those that it is told: ``network(x, 0, 2)``."""

    def __init__(self, number: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(3, 2) for _ in range(number)])

    def forward(self, x: Tensor, *used: int) -> Tensor:
        return torch.stack([self.branches[index](x) for index in used]).sum(0)


class Counter(nn.Module):
    """A linear layer, and a buffer ``count`` that every forward pass increases by ``step`` and adds to the output."""

    count: Tensor

    def __init__(self, start: float = 0.0, step: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.step = nn.Linear(3, 2), step
        self.register_buffer("count", torch.tensor([start], dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.step
        output: Tensor = self.layer(x) + self.count
        return output

    def expect(self, count: float, when: str) -> None:
        """:raises Wrong: if the buffer has another value"""
        if self.count.item() != count:
            raise Wrong(f"the buffer is {self.count.item():g} instead of {count:g} {when}")
