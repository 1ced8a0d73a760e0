"""`delay_all_reduce_named_params` with float64

Why: `_register_delay_all_reduce_hook` allocates `torch.zeros(...)`, which is float32 whatever the parameters are; bfloat16
fails in the same way.

With torch's: leave out the option.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddp.conformance.differences.program import TwoLines, grad, main, x


def case(DDP: Any) -> Iterator[str]:
    network = TwoLines().double()
    model = DDP(
        network,
        delay_all_reduce_named_params=[("b.weight", network.b.weight)],
        param_to_hook_all_reduce=network.a.weight,
    )
    model(x().double()).backward()
    yield f"a: {grad(network.a.weight)}, b: {grad(network.b.weight)}"


if __name__ == "__main__":
    main(case)
