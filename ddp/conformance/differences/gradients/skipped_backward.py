"""A forward pass without its backward pass, then `no_sync`

The gradients of the next micro-step are averaged, though it is under `no_sync`. A backward pass is skipped, for example,
where a loss is not finite, or where an evaluation forgets `torch.no_grad()`. Why: `_post_forward` tells the reducer that a
backward pass will be averaged (`prepare_for_backward`), and a forward pass under `no_sync` does not take that back.

With torch's: let a forward pass that no backward pass follows run under `torch.no_grad()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddp.conformance.differences.program import grad, line, main, x


def case(DDP: Any) -> Iterator[str]:
    network = line()
    model = DDP(network)
    model(x())
    with model.no_sync():
        model(x()).backward()
    yield f"under no_sync: {grad(network.weight)}"


if __name__ == "__main__":
    main(case)
