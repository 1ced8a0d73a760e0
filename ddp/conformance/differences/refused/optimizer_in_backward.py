"""`_apply_optimizer_in_backward` on a CPU

A step of 0.1 times the average gradient of 2 makes the weight 0.8. Why: `_apply_optim_in_backward_hook` makes a
`torch.Stream()`, of the accelerator that torch was built for.

With torch's: step after backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]

from ddp.conformance.differences.program import line, main, x


def case(DDP: Any) -> Iterator[str]:
    network = line()
    _apply_optimizer_in_backward(torch.optim.SGD, network.parameters(), {"lr": 0.1})
    model = DDP(network)
    model(x()).backward()
    yield f"weight: {network.weight.item():.1f}"


if __name__ == "__main__":
    main(case)
