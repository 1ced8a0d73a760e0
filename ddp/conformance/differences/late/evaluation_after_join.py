"""Rank 0 evaluates alone after `join`

Without `join`, a forward pass under `no_grad` sends nothing if the module has no buffers. After a block of `join`, it still sends
what tells ranks that have joined to take part, and so waits for the other ranks. Why: `Join.__exit__` leaves `_join_config.enable`
at True.

With torch's: evaluate `model.module`, or leave the state by an empty block, `with model.join(enable=False): pass`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ddp.conformance.differences.program import grad, hang_for_two_seconds, line, main, x


def case(DDP: Any) -> Iterator[str]:
    network = line()
    model = DDP(network)
    with model.join():
        model(x()).backward()
    hang_for_two_seconds()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(x())
    dist.barrier()
    yield f"gradient: {grad(network.weight)}"


if __name__ == "__main__":
    main(case)
