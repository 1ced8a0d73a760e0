"""`find_unused_parameters` with two forward passes and one backward pass

One wrapper, two tasks, one backward pass of the sum of their losses. Why: the second `prepare_for_backward` forgets what the
first forward pass used; `a` counts as unused, and then becomes ready. Issues #60844 and #105723.

With torch's: call the model once, with both batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddp.conformance.differences.program import TwoLines, grad, main, x


def case(DDP: Any) -> Iterator[str]:
    network = TwoLines()
    model = DDP(network, find_unused_parameters=True)
    (model(x(), "a") + model(x(), "b")).backward()
    yield f"a: {grad(network.a.weight)}, b: {grad(network.b.weight)}"


if __name__ == "__main__":
    main(case)
