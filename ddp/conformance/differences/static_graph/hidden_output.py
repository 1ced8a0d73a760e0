"""A module that returns a dataclass

Gradients are never averaged. Why: `_post_forward` looks for tensors by `tree_flatten`, which does not look into a dataclass
that is not registered, so that `_DDPSink` is nowhere. (`_find_tensors`, in the same file, does look into it.) An object of
another class, a loss that the module keeps in an attribute, and an output that is a parameter itself have the same effect.
Issue #106690.

With torch's: return tensors in tuples, lists or dicts, or register the class with
`torch.utils._pytree.register_pytree_node`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ddp.conformance.differences.program import grad, line, main, x


@dataclass
class Output:
    y: Tensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = line()

    def forward(self, x: Tensor) -> Output:
        return Output(self.line(x))


def case(DDP: Any) -> Iterator[str]:
    network = Model()
    model = DDP(network, static_graph=True)
    for step in range(2):
        network.zero_grad()
        model(x()).y.backward()
        yield f"step {step}: {grad(network.line.weight)}"


if __name__ == "__main__":
    main(case)
