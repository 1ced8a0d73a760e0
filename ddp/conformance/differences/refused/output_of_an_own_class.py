"""`find_unused_parameters` with an output of an own class

Why: `_find_tensors` finds no tensor in the object, so all parameters count as unused, and then become ready.

With torch's: return tensors in tuples, lists, dicts or dataclasses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ddp.conformance.differences.program import grad, line, main, x


class Output:
    def __init__(self, y: Tensor) -> None:
        self.y = y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = line()

    def forward(self, x: Tensor) -> Output:
        return Output(self.line(x))


def case(DDP: Any) -> Iterator[str]:
    network = Model()
    model = DDP(network, find_unused_parameters=True)
    model(x()).y.backward()
    yield f"gradient: {grad(network.line.weight)}"


if __name__ == "__main__":
    main(case)
