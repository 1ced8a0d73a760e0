"""`delay_all_reduce_named_params` under `no_sync`

Delayed parameters (here `b`) are averaged under `no_sync` as well, and once more with what follows. Why:
`_delayed_all_reduce_hook` does not look at `require_backward_grad_sync`.

With torch's: no micro-steps with this option.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ddp.conformance.differences.program import TwoLines, grad, main, x


def case(DDP: Any) -> Iterator[str]:
    network = TwoLines()
    model = DDP(
        network,
        delay_all_reduce_named_params=[("b.weight", network.b.weight)],
        param_to_hook_all_reduce=network.a.weight,
    )
    with model.no_sync():
        model(x()).backward()
    dist.barrier()
    time.sleep(0.3)  # torch's does not wait
    yield f"a: {grad(network.a.weight)}, b: {grad(network.b.weight)}"


if __name__ == "__main__":
    main(case)
