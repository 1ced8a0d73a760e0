"""`find_unused_parameters` with a parameter that the loss uses and the forward pass does not

A regularizer, or a learnt temperature of the loss. Why: `Reducer::search_unused_parameters` starts at the outputs, so `b`
counts as unused, and then becomes ready.

With torch's: compute the loss within the module's forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddp.conformance.differences.program import TwoLines, grad, main, x


def case(DDP: Any) -> Iterator[str]:
    network = TwoLines()
    model = DDP(network, find_unused_parameters=True)
    (model(x(), "a") + network.b(x())).backward()
    yield f"a: {grad(network.a.weight)}, b: {grad(network.b.weight)}"


if __name__ == "__main__":
    main(case)
