"""A parameter without a gradient

torch says nothing in the backward pass that gives `b` no gradient. Their bucket waits for `b`, so the gradient of `a` stays
each rank's own; the optimizer steps, and the ranks' weights differ from then on. The next forward pass raises, and names no
parameter. Why: `Reducer::ensure_prior_reduction_finished` is called before a forward pass (`_rebuild_buckets`), not after a
backward pass.

With torch's: call `model._check_reducer_finalized()` after each backward pass, which raises it in time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ddp.conformance.differences.program import TwoLines, main, x


def case(DDP: Any) -> Iterator[str]:
    network = TwoLines()
    model = DDP(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for step in range(2):
        model(x(), "a").backward()
        optimizer.step()
        yield f"after step {step} the weight is {network.a.weight.item():.1f}"


if __name__ == "__main__":
    main(case)
