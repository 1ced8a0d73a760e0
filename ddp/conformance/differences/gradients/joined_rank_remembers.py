"""`find_unused_parameters` with `join`: a gradient of zeros for a parameter that no rank uses

Rank 0 uses `b` in its second batch and not in its third, when rank 1 has joined. The gradient of `b` must then stay None, as
it does without `join`; torch makes it zeros, so weight decay and momentum move a parameter that must rest. Why:
`_match_unused_params_allreduce` sums the map of used parameters into the joined rank's own map, which it never clears and
sends again.

With torch's: no `weight_decay` and no momentum for parameters that may be unused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ddp.conformance.differences.program import TwoLines, grad, main, x


def case(DDP: Any) -> Iterator[str]:
    network = TwoLines()
    model = DDP(network, find_unused_parameters=True)
    with model.join():
        for which in ["ab", "ab", "a"][: 3 - 2 * dist.get_rank()]:  # rank 1 has one batch
            network.zero_grad()
            model(x(), which).backward()
    yield f"gradient of b: {grad(network.b.weight)}"


if __name__ == "__main__":
    main(case)
