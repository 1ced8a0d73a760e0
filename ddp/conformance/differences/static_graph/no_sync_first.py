"""Micro-steps under `no_sync` from the start

Gradient accumulation fails in the first micro-step. Why: `_DDPSink` asks for the averages of a backward pass that
`prepare_for_backward` was not called for. Issues #143580 and #187732.

With torch's: one step without `no_sync` first, or `static_graph=False`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddp.conformance.differences.program import grad, line, main, x


def case(DDP: Any) -> Iterator[str]:
    network = line()
    model = DDP(network, static_graph=True)
    with model.no_sync():
        model(x()).backward()
    model(x()).backward()
    yield f"the sum of two micro-steps: {grad(network.weight)}"


if __name__ == "__main__":
    main(case)
