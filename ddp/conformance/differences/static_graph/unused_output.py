"""An output that the loss never uses

The first step is right. In the second, the gradients are each rank's own, and the third forward pass raises. The graph did
not change. Why: in the first step `_DDPSink` passes (no) gradients on to both outputs, so `b` counts as used; later it is
gone, and `b` never becomes ready. Issue #97030.

With torch's: return only what the loss uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ddp.conformance.differences.program import TwoLines, grad, main, x


class TwoOutputs(TwoLines):
    def forward(self, x: Tensor, which: str = "ab") -> Any:
        return self.a(x), self.b(x)


def case(DDP: Any) -> Iterator[str]:
    network = TwoOutputs()
    model = DDP(network, static_graph=True)
    for step in range(3):
        network.zero_grad()
        model(x())[0].backward()
        yield f"step {step}: {grad(network.a.weight)}"


if __name__ == "__main__":
    main(case)
