"""`join(divide_by_initial_world_size=False)`, then `join(enable=False)`

In the second block each rank divides by the number of ranks that it saw last in the first one: rank 0 by 1, rank 1 by 2. The
sum is 1 / 1 + 3 / 2, not the average. Why: `Reducer::set_divide_factor` asks the handle that `_set_forward_pass_work_handle`
was given in the first block, and nothing removes it.

With torch's: the default, `divide_by_initial_world_size=True`, or one wrapper for each of the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ddp.conformance.differences.program import grad, line, main, x


def case(DDP: Any) -> Iterator[str]:
    network = line()
    model = DDP(network)
    with model.join(divide_by_initial_world_size=False):
        for _ in range(2 - dist.get_rank()):  # rank 0 has two batches, rank 1 has one
            model(x()).backward()
    network.zero_grad()
    with model.join(enable=False):
        model(x()).backward()
    yield f"gradient: {grad(network.weight)}"


if __name__ == "__main__":
    main(case)
