"""`join` on a rank that has no batch at all

The job hangs, or dies with an error of the transport. Why: in the first step `Reducer::delay_all_reduce` sends the map of
used parameters, then the buckets. A rank that has joined sends the buckets alone (`_DDPJoinHook.main_hook` asks for
`find_unused_parameters`).

With torch's: give every rank at least one batch, or `static_graph=False`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ddp.conformance.differences.program import grad, hang_for_two_seconds, line, main, x


def case(DDP: Any) -> Iterator[str]:
    network = line()
    model = DDP(network, static_graph=True)
    hang_for_two_seconds()
    with model.join():
        if dist.get_rank() == 0:
            model(x()).backward()
    yield f"gradient: {grad(network.weight)}"


if __name__ == "__main__":
    main(case)
