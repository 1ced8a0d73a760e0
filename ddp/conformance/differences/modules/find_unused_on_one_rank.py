"""`find_unused_parameters=True` on one rank only

Rank 0 waits in the first step, and rank 1 in the second. Why: the option decides which collectives follow
(`Reducer::all_reduce_local_used_map`), and is not compared.

With torch's: take options from what all ranks share, not from what each one finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ddp.conformance.differences.program import grad, hang_for_two_seconds, line, main, x


def case(DDP: Any) -> Iterator[str]:
    network = line()
    model = DDP(network, find_unused_parameters=dist.get_rank() == 0)
    hang_for_two_seconds()
    for step in range(2):
        network.zero_grad()
        model(x()).backward()
        yield f"step {step}: {grad(network.weight)}"


if __name__ == "__main__":
    main(case)
