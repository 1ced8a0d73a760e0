"""`delay_all_reduce_named_params` does not wait

The gradients of delayed parameters are not averages yet when backward is over; a slow rank 1 makes that visible here. An
optimizer that steps now takes what is there. Why: `_delayed_all_reduce_hook` drops the handle of its all-reduce, `_ =
dist.all_reduce(..., async_op=True)`.

With torch's: leave the option out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ddp.conformance.differences.program import TwoLines, grad, line, main, x


def case(DDP: Any) -> Iterator[str]:
    network, first = TwoLines(), line()
    model = DDP(
        network,
        delay_all_reduce_named_params=[("a.weight", network.a.weight)],
        param_to_hook_all_reduce=first.weight,
    )
    dist.barrier()
    hidden = first(x())
    hidden.register_hook(lambda _: time.sleep(0.5 * dist.get_rank()))
    model(hidden).backward()
    now = grad(network.a.weight)
    time.sleep(1)
    if dist.get_rank() == 0:
        yield f"when backward is over: {now}, a second later: {grad(network.a.weight)}"


if __name__ == "__main__":
    main(case)
