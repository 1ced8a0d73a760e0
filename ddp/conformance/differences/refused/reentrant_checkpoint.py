"""`find_unused_parameters` with a reentrant checkpoint

Why: the graph of the checkpointed part does not exist when `Reducer::search_unused_parameters` runs, so its parameters count
as unused, and then become ready. Issue #24005.

With torch's: `checkpoint(..., use_reentrant=False)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ddp.conformance.differences.program import TwoLines, grad, main, x


class Checkpointed(TwoLines):
    def forward(self, x: Tensor, which: str = "ab") -> Tensor:
        return self.b(checkpoint(self.a, x, use_reentrant=True))  # type: ignore[no-any-return]


def case(DDP: Any) -> Iterator[str]:
    network = Checkpointed()
    model = DDP(network, find_unused_parameters=True)
    model(x().requires_grad_()).backward()
    yield f"a: {grad(network.a.weight)}, b: {grad(network.b.weight)}"


if __name__ == "__main__":
    main(case)
