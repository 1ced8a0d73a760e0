"""Two forward passes, then two backward passes

Only the first backward pass is averaged; the second adds each rank's own gradient. The same happens with
`loss.backward(retain_graph=True)` and a second `loss.backward()`. Why: `_post_forward` tells the reducer that one backward
pass follows, and `Reducer::finalize_backward` takes that back (`expect_autograd_hooks_ = false`). Issue #47260.

With torch's: one backward pass of the sum of the losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddp.conformance.differences.program import grad, line, main, x


def case(DDP: Any) -> Iterator[str]:
    network = line()
    model = DDP(network)
    first, second = model(x()), model(x())
    first.backward()
    yield f"after the first: {grad(network.weight)}"
    second.backward()
    yield f"after both: {grad(network.weight)}"


if __name__ == "__main__":
    main(case)
